#include "kernels/backend.h"

#include <utility>

namespace flashquant {

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this != &other) {
    Reset();
    backend_ = std::exchange(other.backend_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    num_bytes_ = std::exchange(other.num_bytes_, 0);
  }
  return *this;
}

void DeviceBuffer::Reset() {
  if (data_ != nullptr) backend_->Free(data_, num_bytes_);
  data_ = nullptr;
}

absl::Status Backend::PlanAttention(const AttentionBatch& /*host_batch*/) {
  return absl::OkStatus();
}

}  // namespace flashquant
