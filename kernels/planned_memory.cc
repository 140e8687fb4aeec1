// See planned_memory.h.
#include "kernels/planned_memory.h"

#include <algorithm>

#include "kernels/base/math_util.h"

namespace flashquant {
namespace {

constexpr int64_t kBFloat16Bytes = 2;
// Of the fused kernel's form (kernels/cuda/linear_w4a16/packed_format.h, whose sizes the test of
// this file compares): a unit is 32 channels x 256 features.
constexpr int64_t kUnitN = 32;
constexpr int64_t kUnitK = 256;
constexpr int64_t kCodeBytes = kUnitN * kUnitK / 2;
constexpr int64_t kRefBytes = 8;
// Of a unit's outliers, besides them: a trailer and, in the mean, what is missing to a multiple of
// 128.
constexpr int64_t kRecordEndBytes = 16 + 56;
constexpr int64_t kRecordAlignment = 128;

constexpr int64_t kCublasBytes = int64_t{32} << 20;
// What the driver takes for kernels once they run, cuBLAS's among them: code, stacks. Measured on
// an H200, 30 November 2026: 320 to 324 MiB, whatever the model.
constexpr int64_t kDriverBytes = int64_t{320} << 20;
// Parts of tiles of 128 channels x 128 rows, two for each of 132 SMs; other cards need less.
constexpr int64_t kPartialSumBytes = int64_t{18} << 20;
constexpr int64_t kMaxUnpackedBytes = int64_t{128} << 20;  // linear_route.h, whose test compares it
constexpr int64_t kUploadBytes = int64_t{1} << 20;
constexpr int64_t kNodeBytes = 2048;   // of a recorded kernel
constexpr int64_t kNodesPerLayer = 9;  // norms, four linears, attention, SiLU
constexpr int32_t kMostFusedRows = 64;

int64_t FusedBytes(const PlannedPart& part) {
  const int64_t units = CeilDiv(part.n, kUnitN) * CeilDiv(part.k, kUnitK);
  const int64_t groups = part.group_size < 128 ? kUnitK / part.group_size : 2;
  const int64_t scales = groups * kUnitN * kBFloat16Bytes * (part.symmetric ? 1 : 2);
  const int64_t outliers =
      part.outlier_records == 0 ? 0 : 16 * part.outlier_records + units * kRecordEndBytes;
  return units * (kCodeBytes + scales) + RoundUp(units * kRefBytes, kRecordAlignment) + outliers;
}

}  // namespace

int64_t PlannedWeightBytes(std::span<const PlannedPart> parts) {
  const bool fused = std::all_of(parts.begin(), parts.end(), [](const PlannedPart& part) {
    return part.int4 && part.n % 8 == 0 && part.k % 8 == 0;
  });
  int64_t num_bytes = 0;
  int64_t columns = 0;
  bool has_bias = false;
  for (const PlannedPart& part : parts) {
    num_bytes += fused ? FusedBytes(part) : part.n * part.k * kBFloat16Bytes;
    columns += part.n;
    has_bias = has_bias || part.has_bias;
  }
  return num_bytes + (has_bias ? columns * kBFloat16Bytes : 0);
}

int64_t PlannedScratchBytes(int64_t largest_int4_weights, int64_t int4_head_columns,
                            int32_t max_sequences) {
  return kDriverBytes + kCublasBytes + kPartialSumBytes + kUploadBytes +
         std::min(largest_int4_weights * kBFloat16Bytes, kMaxUnpackedBytes) +
         int4_head_columns * std::min(max_sequences, kMostFusedRows) * kBFloat16Bytes;
}

int64_t PlannedRecordingBytes(int32_t num_layers, int32_t max_sequences, int32_t row_multiple) {
  const int64_t recordings = CeilDiv(max_sequences, std::max(row_multiple, 1));
  return recordings * (num_layers * kNodesPerLayer + 8) * kNodeBytes;
}

}  // namespace flashquant
