#include "kernels/cuda/backend/linear_route.h"

#include <algorithm>

namespace flashquant::cuda {
namespace {

struct Crossing {
  int32_t major;        // compute capability
  int64_t min_weights;  // K * N
  double max_outliers;  // bytes of them for each weight
  int32_t max_pass_rows;
};

// The first that fits counts.
constexpr Crossing kCrossings[] = {
    // H200, 30 November 2026: above some 50 million weights the BF16 copy does not stay in the
    // cache
    // between unpacking and cuBLAS, so that a third pass is still cheaper, but for many outliers.
    {9, int64_t{50} << 20, 0.1, 96},
};

// Two passes: what a weight in BF16 costs in reading alone is four times that in INT4.
constexpr int32_t kNotMeasured = 64;

constexpr int64_t kBFloat16Bytes = 2;

}  // namespace

int32_t MaxPassRows(int32_t major, const PackedLayout& layout) {
  const int64_t weights = int64_t{layout.k} * layout.n;
  const auto outlier_bytes = static_cast<double>(layout.num_bytes - layout.outliers_offset);
  for (const Crossing& crossing : kCrossings) {
    if (crossing.major == major && weights >= crossing.min_weights &&
        outlier_bytes <= crossing.max_outliers * static_cast<double>(weights)) {
      return crossing.max_pass_rows;
    }
  }
  return kNotMeasured;
}

int32_t UnpackStripsAtOnce(const PackedLayout& layout) {
  constexpr int32_t kFewest = 4;
  const int64_t strip_bytes = int64_t{kStripN} * layout.k * kBFloat16Bytes;
  return std::clamp(static_cast<int32_t>(kMaxUnpackedBytes / strip_bytes),
                    std::min(kFewest, layout.num_strips), layout.num_strips);
}

}  // namespace flashquant::cuda
