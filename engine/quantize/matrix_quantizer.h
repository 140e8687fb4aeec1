// Quantizes one linear layer's weight to INT4 plus BF16 outliers: the groups' scales and zero
// points, the choice of outliers and the codes. Encoding to Tile-COO is done by
// kernels/format/tile_coo_encoder.h, files by checkpoint_quantizer.h.
//
// Round-to-nearest: no calibration data. With "replace" semantics the code under an outlier is the
// zero point, so the dense part gives exactly 0 there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/quantize/outlier_selector.h"
#include "engine/quantize/quantized_matrix.h"
#include "kernels/quantizer_ops.h"

namespace flashquant {

struct MatrixQuantizerOptions {
  int64_t group_size = 128;  // 32, 64, 128; -1 = one group per row
  bool symmetric = false;
  double density = 0.01;  // stored slots / (K * N), 0 .. kMaxDensity; 0 = no outliers
  OutlierRule rule = OutlierRule::kErrorWithRescale;
  // Above 0: not a budget, but every record whose four weights cost more than this on average.
  double least_benefit = 0;
  int32_t tile_k = 256;    // a multiple of the group size
  int num_threads = 1;     // does not change the result
  int descent_sweeps = 4;  // QuantizeMatrixGptq only
};

// A quarter of a tile column is the most that the search looks at.
inline constexpr double kMaxDensity = 0.2;

// Records that options.density allows for an [n, k] matrix; with a threshold, as many as there can
// be.
int64_t RecordBudget(int64_t n, int64_t k, const MatrixQuantizerOptions& options);

// weights: [n, k] row-major, finite, at most kMaxWeightMagnitude (the caller checks). The result is
// the same, bit for bit, for any num_threads.
QuantizedMatrix QuantizeMatrix(std::span<const float> weights, int64_t n, int64_t k,
                               const MatrixQuantizerOptions& options);

// The same with the groups' curves from `ops`, where the options need any. Errors: those of `ops`.
absl::StatusOr<QuantizedMatrix> QuantizeMatrix(QuantizerOps* ops, std::span<const float> weights,
                                               int64_t n, int64_t k,
                                               const MatrixQuantizerOptions& options);

}  // namespace flashquant
