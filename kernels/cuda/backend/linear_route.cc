#include "kernels/cuda/backend/linear_route.h"

#include <algorithm>

namespace flashquant::cuda {
namespace {

// H200, 30 November 2026, seven shapes at 1 and 3% outliers: up to 16 rows reading is what limits,
// and the passes' plans fit the layer better; 385 rows and more would dequantise a fourth time.
constexpr FusedRows kWithManyRows = {.passes = 16, .many_rows = 384};

// Two passes: what a weight in BF16 costs in reading alone is four times that in INT4.
constexpr FusedRows kPassesOnly = {.passes = 64, .many_rows = 0};

constexpr int64_t kBFloat16Bytes = 2;

}  // namespace

FusedRows ChooseFusedRows(bool has_many_rows) {
  return has_many_rows ? kWithManyRows : kPassesOnly;
}

int32_t UnpackStripsAtOnce(const PackedLayout& layout) {
  constexpr int32_t kFewest = 4;
  const int64_t strip_bytes = int64_t{kStripN} * layout.k * kBFloat16Bytes;
  return std::clamp(static_cast<int32_t>(kMaxUnpackedBytes / strip_bytes),
                    std::min(kFewest, layout.num_strips), layout.num_strips);
}

}  // namespace flashquant::cuda
