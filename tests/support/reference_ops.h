// The oracle for every backend op: naive loops in double precision, no SIMD, no code shared with a
// backend. Inputs are what the op's input tensors hold, as floats.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/op_params.h"

namespace flashquant {

// A linear layer of one or more parts joined along N, as dense matrices [N, K].
struct ReferenceLinear {
  int64_t n = 0;
  int64_t k = 0;
  std::vector<double> weight;
  // Per weight: the greatest magnitude that adding it up may go through on the way, scale * (code +
  // zero point) for INT4; what rounding errors are relative to.
  std::vector<double> magnitude;
  std::vector<double> bias;
};
ReferenceLinear MakeReferenceLinear(std::span<const LinearPart> parts);

// y[M, N] = x[M, K] W^T + bias; the second result is the sum of magnitudes of each output.
struct ReferenceProduct {
  std::vector<double> y;
  std::vector<double> magnitude;
};
ReferenceProduct MultiplyReference(const ReferenceLinear& linear, std::span<const float> x,
                                   int64_t num_rows);

// `residual` (may be empty) is updated to residual + x.
std::vector<double> ReferenceRmsNorm(std::span<const float> x, std::vector<double>& residual,
                                     std::span<const float> weight, int64_t num_rows,
                                     double epsilon);

// Rotates one head, [D], in place by Hugging Face's half-split pairing.
void ReferenceRope(std::span<double> head, std::span<const double> cosines,
                   std::span<const double> sines);

// One query head over the keys and values [num_keys][D] that it sees.
std::vector<double> ReferenceAttentionHead(std::span<const double> q, std::span<const double> keys,
                                           std::span<const double> values, double softmax_scale);

// gate_up: [rows, 2 * intermediate].
std::vector<double> ReferenceSiluAndMul(std::span<const float> gate_up, int64_t num_rows);

// The probability of each token under the filters of `row`, in their order; a full sort. Greedy
// rows give one token probability 1.
std::vector<double> ReferenceTokenProbabilities(std::span<const float> logits, const SampleRow& row,
                                                std::span<const int32_t> banned_ids);
std::vector<double> ReferenceTokenProbabilities(const std::vector<double>& logits,
                                                const SampleRow& row,
                                                std::span<const int32_t> banned_ids);

// What came before the token to draw, as it came, and the biases.
struct ReferenceHistory {
  std::vector<int32_t> prompt;
  std::vector<int32_t> answer;
  std::vector<TokenBias> biases;
};
// The logits after the penalties of `row` and the biases, from their definitions.
std::vector<double> ReferencePenalisedLogits(std::span<const float> logits, const SampleRow& row,
                                             const ReferenceHistory& history);
// Natural logarithm of each token's probability.
std::vector<double> ReferenceLogprobs(std::span<const float> logits);

}  // namespace flashquant
