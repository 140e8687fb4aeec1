// Arrays of the quantizer between host and device memory.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/base/status_macros.h"

namespace flashquant::cuda {

// At least so many bytes in `buffer`; what it held is lost when it grows.
inline absl::Status Reserve(Backend* backend, int64_t num_bytes, DeviceBuffer* buffer) {
  if (buffer->num_bytes() >= num_bytes) return absl::OkStatus();
  *buffer = DeviceBuffer();  // before the new one is there
  FQ_ASSIGN_OR_RETURN(*buffer, backend->Allocate(num_bytes));
  return absl::OkStatus();
}

template <typename T>
absl::Status Upload(Backend* backend, std::span<const T> values, DeviceBuffer* buffer) {
  const auto num_bytes = static_cast<int64_t>(values.size_bytes());
  FQ_RETURN_IF_ERROR(Reserve(backend, num_bytes, buffer));
  return backend->CopyToDevice(buffer->data(), values.data(), num_bytes);
}

// Waits for the device.
template <typename T>
absl::StatusOr<std::vector<T>> Download(Backend* backend, const void* device, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  FQ_RETURN_IF_ERROR(backend->CopyToHost(values.data(), device, count * int64_t{sizeof(T)}));
  FQ_RETURN_IF_ERROR(backend->Synchronize());
  return values;
}

}  // namespace flashquant::cuda
