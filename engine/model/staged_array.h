// StagedArray: an array that is filled on the host each step and copied to its twin in backend
// memory.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

template <typename T>
class StagedArray final {
 public:
  // Makes room for `capacity` elements, once.
  absl::Status Reserve(Backend* backend, int64_t capacity) {
    host_.reserve(static_cast<size_t>(capacity));
    FQ_ASSIGN_OR_RETURN(device_, backend->Allocate(capacity * static_cast<int64_t>(sizeof(T))));
    return absl::OkStatus();
  }
  // Copies what was pushed. More than was reserved is a bug.
  absl::Status Upload(Backend* backend) {
    const auto num_bytes = static_cast<int64_t>(host_.size() * sizeof(T));
    FQ_CHECK(num_bytes <= device_.num_bytes());
    return backend->CopyToDevice(device_.data(), host_.data(), num_bytes);
  }

  void Clear() { host_.clear(); }
  void Push(T value) { host_.push_back(value); }
  int32_t size() const { return static_cast<int32_t>(host_.size()); }
  const T* host() const { return host_.data(); }
  const T* device() const { return device_.template As<T>(); }

 private:
  std::vector<T> host_;
  DeviceBuffer device_;
};

}  // namespace flashquant
