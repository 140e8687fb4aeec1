#include "engine/quantize/tensor_conversion.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "engine/checkpoint/quantized_tensors.h"
#include "engine/quantize/int4_quantizer.h"
#include "engine/quantize/parallel_for.h"
#include "engine/quantize/table_quantizer.h"
#include "kernels/base/bfloat16.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kPieceWeights = int64_t{1} << 20;

template <typename Element>
std::span<const uint8_t> AsBytes(const std::vector<Element>& elements) {
  return {reinterpret_cast<const uint8_t*>(elements.data()), elements.size() * sizeof(Element)};
}

}  // namespace

absl::Status CheckWeights(const std::string& name, std::span<const float> weights, int64_t k,
                          int num_threads) {
  std::atomic<int64_t> first_bad{INT64_MAX};
  const int64_t count = static_cast<int64_t>(weights.size());
  ParallelFor(num_threads, count, kPieceWeights, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (std::fabs(weights[static_cast<size_t>(i)]) <= kMaxWeightMagnitude) continue;
      int64_t before = first_bad.load();
      while (i < before && !first_bad.compare_exchange_weak(before, i)) {
      }
      return;
    }
  });
  const int64_t bad = first_bad.load();
  if (bad == INT64_MAX) return absl::OkStatus();
  return DataLossError("tensor {}: weight at row {}, column {} is not finite or above {} (got {})",
                       name, bad / k, bad % k, kMaxWeightMagnitude,
                       weights[static_cast<size_t>(bad)]);
}

absl::Status WriteInt8(const TensorSource& tensors, const TensorInfo& source,
                       const PlannedTensor& planned, int num_threads, CheckpointWriter* writer) {
  const int64_t rows_per_piece = std::max<int64_t>(1, kPieceWeights / planned.k);
  std::vector<int8_t> codes(static_cast<size_t>(planned.n * planned.k));
  std::vector<BFloat16> scales(static_cast<size_t>(planned.n));
  std::vector<float> piece;
  for (int64_t row = 0; row < planned.n; row += rows_per_piece) {
    const int64_t count = std::min(rows_per_piece, planned.n - row);
    piece.resize(static_cast<size_t>(count * planned.k));
    FQ_RETURN_IF_ERROR(tensors.ReadRowsAsFloat(source, row, count, piece.data()));
    FQ_RETURN_IF_ERROR(CheckWeights(planned.source, piece, planned.k, num_threads));
    ParallelFor(num_threads, count, 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const size_t k = static_cast<size_t>(planned.k);
        scales[static_cast<size_t>(row + i)] =
            QuantizeTableRow(std::span<const float>(piece).subspan(static_cast<size_t>(i) * k, k),
                             std::span<int8_t>(codes).subspan(static_cast<size_t>(row + i) * k, k));
      }
    });
  }
  return WriteInt8Table(writer, planned.name, planned.n, planned.k, codes, scales);
}

absl::Status WriteBFloat16(const TensorSource& tensors, const TensorInfo& source,
                           const PlannedTensor& planned, int num_threads,
                           CheckpointWriter* writer) {
  FQ_RETURN_IF_ERROR(writer->BeginTensor(planned.name, DType::kBF16, source.shape));
  const int64_t rows = source.num_rows();
  int64_t per_row = 1;
  for (size_t i = 1; i < source.shape.size(); ++i) per_row *= source.shape[i];
  const int64_t rows_per_piece = std::max<int64_t>(1, kPieceWeights / per_row);
  std::vector<float> piece;
  std::vector<BFloat16> converted;
  for (int64_t row = 0; row < rows; row += rows_per_piece) {
    const int64_t count = std::min(rows_per_piece, rows - row);
    piece.resize(static_cast<size_t>(count * per_row));
    converted.resize(piece.size());
    FQ_RETURN_IF_ERROR(tensors.ReadRowsAsFloat(source, row, count, piece.data()));
    FQ_RETURN_IF_ERROR(CheckWeights(planned.source, piece, per_row, num_threads));
    std::transform(piece.begin(), piece.end(), converted.begin(),
                   [](float weight) { return ToBFloat16(weight); });
    FQ_RETURN_IF_ERROR(writer->AppendBytes(AsBytes(converted)));
  }
  return absl::OkStatus();
}

absl::Status WriteCopy(const TensorSource& tensors, const TensorInfo& source,
                       const PlannedTensor& planned, CheckpointWriter* writer) {
  FQ_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, tensors.ReadBytes(planned.source));
  return writer->AddTensor(planned.name, source.dtype, source.shape, bytes);
}

}  // namespace flashquant
