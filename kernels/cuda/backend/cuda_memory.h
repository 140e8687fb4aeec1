// Pinned host memory between the caller and the device: uploads that need not wait for the stream,
// and read-backs that wait for their own copy alone. Used from one thread.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace flashquant::cuda {

// Owning pinned memory; empty by default.
class PinnedMemory final {
 public:
  PinnedMemory() = default;
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept { *this = std::move(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  static absl::StatusOr<PinnedMemory> Create(int64_t num_bytes);

  uint8_t* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

// An event that can be recorded and waited for again and again.
class Event final {
 public:
  Event() = default;
  ~Event();
  Event(Event&& other) noexcept { *this = std::move(other); }
  Event& operator=(Event&& other) noexcept;
  // `timed`: for SecondsSince.
  static absl::StatusOr<Event> Create(bool timed = false);

  absl::Status Record(cudaStream_t stream);
  // Returns at once when nothing was recorded.
  absl::Status Wait();
  // Of two timed events that have happened; 0 when one was not recorded.
  double SecondsSince(const Event& earlier) const;

 private:
  cudaEvent_t event_ = nullptr;
};

// Copies from host to device in stream order. The host memory may be changed as soon as Copy
// returns: it is copied into one of a few pinned buffers, which is reused when the device has read
// it. Waits only when all of them are full.
class UploadRing final {
 public:
  static absl::StatusOr<UploadRing> Create(cudaStream_t stream);
  absl::Status Copy(void* device, const void* host, int64_t num_bytes);

 private:
  static constexpr int64_t kBufferBytes = int64_t{4} << 20;
  struct Buffer {
    PinnedMemory memory;
    Event read;  // the device has read all of it
  };

  absl::Status NextBuffer();

  cudaStream_t stream_ = nullptr;
  std::array<Buffer, 4> buffers_;
  size_t current_ = 0;
  int64_t used_ = 0;  // bytes of the current buffer, multiple of 16
};

// One read-back under way: Queue copies in stream order, Finish waits for that copy alone.
class ReadBackSlot final {
 public:
  absl::Status Queue(const void* device, int64_t num_bytes, cudaStream_t stream);
  absl::Status Finish(void* host);

 private:
  PinnedMemory memory_;
  Event copied_;
  int64_t num_bytes_ = 0;
};

}  // namespace flashquant::cuda
