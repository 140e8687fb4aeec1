// GpuMonitor: what a card says of itself through the driver's management library (NVML), which is
// opened at run time and may be missing. No CUDA in here; of all builds.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace flashquant {

// Values that the card or its driver does not give are absent.
struct GpuReading {
  std::optional<int64_t> memory_total_bytes;
  std::optional<int64_t> memory_used_bytes;  // by all processes and the driver
  std::optional<double> utilization;         // 0 to 1: share of the time with a kernel running
  std::optional<double> temperature_celsius;
  std::optional<double> power_watts;
  std::optional<double> energy_joules;  // since the driver was loaded
  std::optional<double> sm_clock_hertz;
  std::optional<double> memory_clock_hertz;
  std::optional<int64_t> ecc_errors;  // uncorrected, since the driver was loaded
};

class GpuMonitor {
 public:
  virtual ~GpuMonitor() = default;
  // The management library's number of the card.
  virtual int index() const = 0;
  // Any thread, one at a time; well under a millisecond, but a card that is lost may take long.
  virtual GpuReading Read() = 0;

  // The card at `pci_bus_id` (BackendInfo). UNAVAILABLE when the library or the card is not there.
  static absl::StatusOr<std::unique_ptr<GpuMonitor>> Open(
      const std::string& pci_bus_id, const std::string& library = "libnvidia-ml.so.1");
};

}  // namespace flashquant
