// Adding is the same in both semantics: in replace mode the dense part is exactly 0 at each slot.
#include "kernels/format/tile_coo_decoder.h"

#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

absl::StatusOr<size_t> NumElements(int64_t k, int64_t n) {
  // k and n are below 2^31.
  if (k * n > kMaxDenseElements) {
    return ResourceExhaustedError("dense matrix of K {} N {} (limit {} elements)", k, n,
                                  kMaxDenseElements);
  }
  return static_cast<size_t>(k * n);
}

}  // namespace

absl::StatusOr<std::vector<float>> DecodeOutliers(const TileCooMatrix& matrix) {
  const TileCooGeometry& geometry = matrix.geometry();
  FQ_ASSIGN_OR_RETURN(const size_t num_elements, NumElements(geometry.k, geometry.n));
  std::vector<float> dense(num_elements, 0.0f);
  matrix.ForEachSlot([&](int64_t k, int64_t n, uint16_t bits) {
    dense[static_cast<size_t>(k * geometry.n + n)] = TileCooValue(geometry.value_type, bits);
  });
  return dense;
}

absl::StatusOr<std::vector<double>> DecodeWeight(const Int4Weight& weight,
                                                 const TileCooMatrix* outliers) {
  FQ_ASSIGN_OR_RETURN(const size_t num_elements, NumElements(weight.k, weight.n));
  std::vector<double> dense(num_elements);
  for (int64_t n = 0; n < weight.n; ++n) {
    for (int64_t k = 0; k < weight.k; ++k) {
      const int64_t group = k / weight.group_size;
      const float scale =
          ToFloat(weight.scales[static_cast<size_t>(n * weight.groups_per_row() + group)]);
      const int32_t steps = weight.Code(n, k) - weight.ZeroPoint(n, group);
      dense[static_cast<size_t>(k * weight.n + n)] = static_cast<double>(scale) * steps;
    }
  }
  if (outliers == nullptr) return dense;
  const TileCooGeometry& geometry = outliers->geometry();
  if (geometry.k != weight.k || geometry.n != weight.n) {
    return InvalidArgumentError("outliers: shape K {} N {} beside an INT4 weight of K {} N {}",
                                geometry.k, geometry.n, weight.k, weight.n);
  }
  outliers->ForEachSlot([&](int64_t k, int64_t n, uint16_t bits) {
    dense[static_cast<size_t>(k * weight.n + n)] +=
        static_cast<double>(TileCooValue(geometry.value_type, bits));
  });
  return dense;
}

}  // namespace flashquant
