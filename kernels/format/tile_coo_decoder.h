// Decoder: Tile-COO and INT4 back to dense matrices, for tests, reports and import. Plain loops;
// kernels decode on the fly and do not use this.
//
// Knows both column modes and both value types.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/format/int4_weight.h"
#include "kernels/format/tile_coo.h"

namespace flashquant {

// Most elements (K * N) that the decoder makes dense: 16 GB of doubles.
inline constexpr int64_t kMaxDenseElements = int64_t{1} << 31;

// W_O as a dense matrix [K, N], row-major; exact. RESOURCE_EXHAUSTED above kMaxDenseElements.
absl::StatusOr<std::vector<float>> DecodeOutliers(const TileCooMatrix& matrix);

// dequant(W_Q) + W_O as a dense matrix [K, N], row-major, of the true sizes. `outliers` may be
// null. Exact in replace mode; in residual mode each sum is rounded to double, which loses nothing
// unless dequant and residual are more than 2^40 apart. `weight` must have passed
// ValidateInt4Weight. INVALID_ARGUMENT when the shapes differ, RESOURCE_EXHAUSTED as above.
absl::StatusOr<std::vector<double>> DecodeWeight(const Int4Weight& weight,
                                                 const TileCooMatrix* outliers);

}  // namespace flashquant
