// Finding the card: what this process may run on, with a plain sentence when it may not.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace flashquant::cuda {

struct DeviceProperties {
  int index = 0;
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int num_multiprocessors = 0;
  int shared_bytes_per_block = 0;  // at most, opted in
  int64_t total_memory_bytes = 0;
  int64_t free_memory_bytes = 0;  // once this process had its context there
  std::string pci_bus_id;         // "0000:0d:00.0"
};

// The first device (CUDA_VISIBLE_DEVICES decides which that is), made this thread's current one.
// UNAVAILABLE: no driver, a driver older than this build needs, no device, a device before compute
// capability 8.0 or one that this build has no code for.
absl::StatusOr<DeviceProperties> OpenDevice();

}  // namespace flashquant::cuda
