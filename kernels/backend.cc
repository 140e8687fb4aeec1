#include "kernels/backend.h"

#include <cstring>
#include <limits>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

absl::Status CheckDensePart(const LinearPart& part) {
  if (part.dense.shape.size() != 2) {
    return InvalidArgumentError("weight with {} dimensions; 2", part.dense.shape.size());
  }
  if (part.dense.data == nullptr) return InvalidArgumentError("weight without data");
  switch (part.dense.dtype) {
    case DType::kBF16:
    case DType::kF16:
    case DType::kF32:
      return absl::OkStatus();
    case DType::kI8:
      if (part.row_scales != nullptr) return absl::OkStatus();
      return InvalidArgumentError("I8 weight without row scales");
    default:
      return InvalidArgumentError("weight dtype {}; BF16, F16, F32 or I8",
                                  DTypeName(part.dense.dtype));
  }
}

absl::Status CheckOutliers(const LinearPart& part) {
  if (part.outliers == nullptr) return absl::OkStatus();
  const TileCooGeometry& geometry = part.outliers->geometry();
  if (geometry.k == part.k() && geometry.n == part.n()) return absl::OkStatus();
  return InvalidArgumentError("outliers are {} x {} (K x N), the weight is {} x {}", geometry.k,
                              geometry.n, part.k(), part.n());
}

}  // namespace

absl::Status CheckLinearParts(std::span<const LinearPart> parts) {
  if (parts.empty()) return InvalidArgumentError("a linear layer of no parts");
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  int64_t n = 0;
  for (const LinearPart& part : parts) {
    if (part.int4 == nullptr) FQ_RETURN_IF_ERROR(CheckDensePart(part));
    if (part.n() < 1 || part.k() < 1 || part.n() > kMax || part.k() > kMax) {
      return InvalidArgumentError("weight of {} x {} (N x K); each 1 to 2^31 - 1", part.n(),
                                  part.k());
    }
    if (part.k() != parts[0].k()) {
      return InvalidArgumentError("parts of one layer with K {} and {}", parts[0].k(), part.k());
    }
    n += part.n();
    if (n > kMax) return InvalidArgumentError("a linear layer of {} outputs; at most 2^31 - 1", n);
    if (part.int4 != nullptr) FQ_RETURN_IF_ERROR(ValidateInt4Weight(*part.int4));
    FQ_RETURN_IF_ERROR(CheckOutliers(part));
  }
  return absl::OkStatus();
}

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

absl::Status Backend::QueueReadBack(int32_t slot, const void* device, int64_t num_bytes) {
  FQ_CHECK(slot >= 0 && slot < kNumReadBackSlots);
  std::vector<uint8_t>& bytes = read_backs_[static_cast<size_t>(slot)];
  bytes.resize(static_cast<size_t>(num_bytes));
  FQ_RETURN_IF_ERROR(CopyToHost(bytes.data(), device, num_bytes));
  return Synchronize();
}

absl::Status Backend::FinishReadBack(int32_t slot, void* host) {
  FQ_CHECK(slot >= 0 && slot < kNumReadBackSlots);
  const std::vector<uint8_t>& bytes = read_backs_[static_cast<size_t>(slot)];
  if (!bytes.empty()) std::memcpy(host, bytes.data(), bytes.size());
  return absl::OkStatus();
}

absl::Status Backend::RecordMark(int32_t slot, int32_t mark) {
  FQ_CHECK(slot >= 0 && slot < kNumReadBackSlots && mark >= 0 && mark < kNumMarks);
  FQ_RETURN_IF_ERROR(Synchronize());
  marks_[static_cast<size_t>(slot)][static_cast<size_t>(mark)] = std::chrono::steady_clock::now();
  return absl::OkStatus();
}

double Backend::SecondsBetweenMarks(int32_t slot, int32_t first, int32_t last) const {
  const Moments& marks = marks_[static_cast<size_t>(slot)];
  return std::chrono::duration<double>(marks[static_cast<size_t>(last)] -
                                       marks[static_cast<size_t>(first)])
      .count();
}

absl::Status Backend::RopeAndAttention(const RopeAndKvWriteParams& rope,
                                       const PagedAttentionParams& attention) {
  FQ_RETURN_IF_ERROR(RopeAndKvWrite(rope));
  return PagedAttention(attention);
}

absl::Status Backend::RunRecorded(const void* /*owner*/, int64_t /*key*/,
                                  const std::function<absl::Status()>& queue) {
  return queue();
}

absl::Status Backend::PlanAttention(const AttentionBatch& /*host_batch*/) {
  return absl::OkStatus();
}

}  // namespace flashquant
