// Large host memory: aligned, zero-filled, refused with a status instead of an exception, and how
// much of it is left. Packed weights, KV blocks and scratch of the CPU backend come from here.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"

namespace flashquant {

// Bytes that this process can still get: the kernel's MemAvailable, or less under a cgroup limit.
int64_t FreeHostMemoryBytes();

// Zero-filled memory at a multiple of 256 bytes; nullptr for 0 bytes. RESOURCE_EXHAUSTED when it is
// more than FreeHostMemoryBytes() or the system refuses. Large blocks ask for huge pages.
absl::StatusOr<void*> AllocateHostMemory(int64_t num_bytes);
void FreeHostMemory(void* data, int64_t num_bytes);

// Owner of such a block.
class HostMemory final {
 public:
  HostMemory() = default;
  ~HostMemory() { FreeHostMemory(data_, num_bytes_); }
  HostMemory(HostMemory&& other) noexcept { *this = std::move(other); }
  HostMemory& operator=(HostMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  static absl::StatusOr<HostMemory> Create(int64_t num_bytes);

  template <typename T>
  T* As() const {
    return static_cast<T*>(data_);
  }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

}  // namespace flashquant
