#include "kernels/cuda/backend/cuda_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/cuda_status.h"

namespace flashquant::cuda {

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

absl::StatusOr<PinnedMemory> PinnedMemory::Create(int64_t num_bytes) {
  void* data = nullptr;
  FQ_RETURN_IF_ERROR(ToStatus(
      cudaHostAlloc(&data, static_cast<size_t>(num_bytes), cudaHostAllocDefault), "pinned memory"));
  PinnedMemory memory;
  memory.data_ = static_cast<uint8_t*>(data);
  memory.num_bytes_ = num_bytes;
  return memory;
}

Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(event_, other.event_);
  return *this;
}

absl::StatusOr<Event> Event::Create(bool timed) {
  Event event;
  FQ_RETURN_IF_ERROR(ToStatus(
      cudaEventCreateWithFlags(&event.event_, timed ? cudaEventDefault : cudaEventDisableTiming),
      "event"));
  return event;
}

absl::Status Event::Record(cudaStream_t stream) {
  return ToStatus(cudaEventRecord(event_, stream), "event record");
}

absl::Status Event::Wait() { return ToStatus(cudaEventSynchronize(event_), "event wait"); }

double Event::SecondsSince(const Event& earlier) const {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, earlier.event_, event_) != cudaSuccess) {
    cudaGetLastError();  // not recorded, or already again: nothing is wrong with the device
    return 0;
  }
  return 1e-3 * static_cast<double>(milliseconds);
}

absl::StatusOr<UploadRing> UploadRing::Create(cudaStream_t stream) {
  UploadRing ring;
  ring.stream_ = stream;
  for (Buffer& buffer : ring.buffers_) {
    FQ_ASSIGN_OR_RETURN(buffer.memory, PinnedMemory::Create(kBufferBytes));
    FQ_ASSIGN_OR_RETURN(buffer.read, Event::Create());
  }
  return ring;
}

absl::Status UploadRing::Copy(void* device, const void* host, int64_t num_bytes) {
  for (int64_t done = 0; done < num_bytes;) {
    if (used_ == kBufferBytes) FQ_RETURN_IF_ERROR(NextBuffer());
    const int64_t part = std::min(num_bytes - done, kBufferBytes - used_);
    uint8_t* staged = buffers_[current_].memory.data() + used_;
    std::memcpy(staged, static_cast<const uint8_t*>(host) + done, static_cast<size_t>(part));
    FQ_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(static_cast<uint8_t*>(device) + done, staged,
                                 static_cast<size_t>(part), cudaMemcpyHostToDevice, stream_),
                 "upload"));
    done += part;
    used_ = std::min(kBufferBytes, RoundUp<int64_t>(used_ + part, 16));
  }
  return absl::OkStatus();
}

absl::Status UploadRing::NextBuffer() {
  FQ_RETURN_IF_ERROR(buffers_[current_].read.Record(stream_));
  current_ = (current_ + 1) % buffers_.size();
  used_ = 0;
  return buffers_[current_].read.Wait();
}

absl::Status ReadBackSlot::Queue(const void* device, int64_t num_bytes, cudaStream_t stream) {
  if (memory_.num_bytes() < std::max<int64_t>(num_bytes, 1)) {
    FQ_ASSIGN_OR_RETURN(memory_, PinnedMemory::Create(RoundUp<int64_t>(num_bytes + 1, 4096)));
    FQ_ASSIGN_OR_RETURN(copied_, Event::Create());
  }
  num_bytes_ = num_bytes;
  if (num_bytes > 0) {
    FQ_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(memory_.data(), device, static_cast<size_t>(num_bytes),
                                 cudaMemcpyDeviceToHost, stream),
                 "read-back"));
  }
  return copied_.Record(stream);
}

absl::Status ReadBackSlot::Finish(void* host) {
  FQ_RETURN_IF_ERROR(copied_.Wait());
  if (num_bytes_ > 0) std::memcpy(host, memory_.data(), static_cast<size_t>(num_bytes_));
  return absl::OkStatus();
}

}  // namespace flashquant::cuda
