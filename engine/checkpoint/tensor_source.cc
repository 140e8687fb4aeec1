#include "engine/checkpoint/tensor_source.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "kernels/base/bfloat16.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// Bytes read at a time where a tensor is only looked at.
constexpr int64_t kPieceBytes = int64_t{1} << 20;

template <typename Stored>
void WidenToFloat(const std::vector<uint8_t>& bytes, float* out) {
  for (size_t i = 0; i < bytes.size() / sizeof(Stored); ++i) {
    Stored value;
    std::memcpy(&value, bytes.data() + i * sizeof(Stored), sizeof(Stored));
    out[i] = ToFloat(value);
  }
}

}  // namespace

const TensorInfo* TensorSource::Find(std::string_view name) const {
  const std::vector<TensorInfo>& all = tensors();
  const auto found = std::lower_bound(
      all.begin(), all.end(), name,
      [](const TensorInfo& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return found != all.end() && found->name == name ? &*found : nullptr;
}

std::optional<uint32_t> TensorSource::StoredChecksum(const TensorInfo& /*tensor*/) const {
  return std::nullopt;
}

absl::Status TensorSource::VerifyChecksum(const TensorInfo& tensor) const {
  const std::optional<uint32_t> stored = StoredChecksum(tensor);
  if (!stored.has_value()) return absl::OkStatus();
  const int64_t row_bytes = tensor.num_bytes / tensor.num_rows();
  const int64_t piece_rows = std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(1, row_bytes));
  std::vector<uint8_t> piece(
      static_cast<size_t>(std::min(piece_rows, tensor.num_rows()) * row_bytes));
  uint32_t crc = 0;
  for (int64_t row = 0; row < tensor.num_rows(); row += piece_rows) {
    const int64_t num_rows = std::min(piece_rows, tensor.num_rows() - row);
    FQ_RETURN_IF_ERROR(ReadRows(tensor, row, num_rows, piece.data()));
    crc = Crc32c(piece.data(), static_cast<size_t>(num_rows * row_bytes), crc);
  }
  if (crc != *stored) {
    return DataLossError("tensor {}: checksum (stated {:08x}, got {:08x})", tensor.name, *stored,
                         crc);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint8_t>> TensorSource::ReadBytes(std::string_view name) const {
  const TensorInfo* const tensor = Find(name);
  if (tensor == nullptr) return DataLossError("missing tensor {}", name);
  std::vector<uint8_t> bytes(static_cast<size_t>(tensor->num_bytes));
  FQ_RETURN_IF_ERROR(Read(*tensor, bytes.data()));
  return bytes;
}

absl::Status TensorSource::ReadRowsAsFloat(const TensorInfo& tensor, int64_t first_row,
                                           int64_t num_rows, float* out) const {
  if (tensor.dtype == DType::kF32) return ReadRows(tensor, first_row, num_rows, out);
  if (tensor.dtype != DType::kBF16 && tensor.dtype != DType::kF16) {
    return DataLossError("tensor {}: dtype (need F32, F16 or BF16, got {})", tensor.name,
                         DTypeName(tensor.dtype));
  }
  const int64_t row_bytes = tensor.num_bytes / tensor.num_rows();
  std::vector<uint8_t> bytes(static_cast<size_t>(num_rows * row_bytes));
  FQ_RETURN_IF_ERROR(ReadRows(tensor, first_row, num_rows, bytes.data()));
  if (tensor.dtype == DType::kBF16) {
    WidenToFloat<BFloat16>(bytes, out);
  } else {
    WidenToFloat<Half>(bytes, out);
  }
  return absl::OkStatus();
}

bool IsCheckedAtLoad(std::string_view tensor_name) {
  constexpr std::array<std::string_view, 6> kSuffixes = {
      ".scales",         ".zeros", ".outlier_tile_indptr", ".outlier_bucket_info",
      ".outlier_groups", "_scale"};
  return std::any_of(kSuffixes.begin(), kSuffixes.end(),
                     [&](std::string_view suffix) { return tensor_name.ends_with(suffix); });
}

}  // namespace flashquant
