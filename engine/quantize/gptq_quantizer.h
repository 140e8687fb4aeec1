// Quantizes one linear layer's weight for least output error over calibration tokens: GPTQ with
// outliers chosen by sensitivity, as SpQR does, followed by coordinate descent.
//
// Sources: Frantar et al., "GPTQ" (2022); Dettmers et al., "SpQR" (2023). Deviations: how many
// outliers a group gets is fixed before the loop, from error curves that weigh each error with its
// cost (group_plan.h), so that a budget is met and no slot is empty; which ones is decided when the
// loop reaches the group, on the weights as compensated until then. Afterwards every code, outlier
// value and scale is set again to what is best given all others ("descent"), which GPTQ's one pass
// cannot do.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "engine/quantize/hessian_factor.h"
#include "engine/quantize/matrix_quantizer.h"
#include "engine/quantize/quantized_matrix.h"
#include "kernels/quantizer_ops.h"

namespace flashquant {

// weights: [n, k] row-major, finite, at most kMaxWeightMagnitude; `factor` of the layer's inputs
// with the same group size (k rounded up to 2 for options.group_size -1). options.rule does not
// matter. Memory: about 16 bytes a weight. The result is the same, bit for bit, for any
// num_threads.
QuantizedMatrix QuantizeMatrixGptq(std::span<const float> weights, int64_t n,
                                   const HessianFactor& factor,
                                   const MatrixQuantizerOptions& options);

// The same through `ops`, which holds the factor whose costs are given (FactorInputs). Errors:
// those of `ops`.
absl::StatusOr<QuantizedMatrix> QuantizeMatrixGptq(QuantizerOps* ops,
                                                   std::span<const float> weights, int64_t n,
                                                   const ColumnCosts& costs,
                                                   const MatrixQuantizerOptions& options);

// The pass over the columns and the descent, on the CPU: QuantizerOps::SolveRows.
SolvedRows SolveRowsOnCpu(const RowsProblem& problem, const HessianFactor& factor, int num_threads);

// Goes on from codes that somebody else made for `weights`: outliers for what the codes miss, as
// many as the options allow, then options.descent_sweeps (at least one) of coordinate descent,
// which may change codes and scales where outliers make others better. `state`: of n rows, no
// outliers.
QuantizedMatrix RefineMatrixGptq(std::span<const float> weights, const HessianFactor& factor,
                                 const MatrixQuantizerOptions& options, MatrixState state);

}  // namespace flashquant
