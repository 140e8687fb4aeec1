// Takes the codes of a GPTQ checkpoint's layer over into our format, and puts outliers beside them
// where the original weights are known.
//
// Scales become BF16, which is what the format stores: every weight moves by at most one part in
// 256 of itself, and the result is compared with the checkpoint's own dequantized matrix. Layers
// whose groups are not contiguous (act-order) cannot be taken over: the format has a group's
// inputs side by side, and nothing of it is permuted. They are quantized anew (layer_quantizer.h).
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "engine/checkpoint/gptq_reader.h"
#include "engine/quantize/hessian_factor.h"
#include "engine/quantize/matrix_quantizer.h"
#include "engine/quantize/quantized_matrix.h"

namespace flashquant {

// Our group size for codes of that one: itself where the format has it, 128 for its multiples, -1
// for -1. UNIMPLEMENTED for others.
absl::StatusOr<int64_t> ImportedGroupSize(int64_t gptq_group_size);

struct ImportedMatrix {
  QuantizedMatrix matrix;
  // Largest difference from the checkpoint's own weights, relative to the weight, before outliers.
  double largest_change = 0;
};

// weights: [n, k] what the codes stand for, or what they were made of (has_original), finite and at
// most kMaxWeightMagnitude. Outliers as options.density or options.least_benefit say, with
// has_original only: without `factor` the weights whose codes are the furthest off, as they were
// before GPTQ; with it those that lower the output error most, with other codes and scales adapted
// to them (gptq_quantizer.h). options.group_size is ImportedGroupSize's, options.symmetric needs
// all zero points to be 8. INTERNAL when the two ways to the dequantized matrix disagree.
absl::StatusOr<ImportedMatrix> ImportGptqLayer(const GptqLayer& layer,
                                               std::span<const float> weights, bool has_original,
                                               const HessianFactor* factor,
                                               const MatrixQuantizerOptions& options);

}  // namespace flashquant
