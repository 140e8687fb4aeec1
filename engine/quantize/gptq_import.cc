#include "engine/quantize/gptq_import.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "engine/quantize/gptq_quantizer.h"
#include "engine/quantize/row_plan.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kLargestGroup = 128;

MatrixState StateOf(const GptqLayer& layer, const MatrixQuantizerOptions& options) {
  MatrixState state;
  state.n = layer.n;
  state.k = layer.k;
  state.group_size = options.group_size == -1 ? RoundUp<int64_t>(layer.k, 2) : options.group_size;
  state.symmetric = options.symmetric;
  state.codes = layer.codes;
  state.mask.assign(layer.codes.size(), 0);
  const int64_t groups = state.groups_per_row();
  state.params.resize(static_cast<size_t>(layer.n * groups));
  for (int64_t row = 0; row < layer.n; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t column = std::min(group * state.group_size, layer.k - 1);
      const size_t from =
          static_cast<size_t>(row * layer.num_groups + layer.group_of[static_cast<size_t>(column)]);
      state.params[static_cast<size_t>(row * groups + group)] = {ToBFloat16(layer.scales[from]),
                                                                 layer.zeros[from]};
    }
  }
  return state;
}

// Both ways to the dense matrix: the checkpoint's own arithmetic and ours.
absl::StatusOr<double> LargestChange(std::span<const float> theirs, std::span<const float> ours) {
  constexpr float kBFloat16Step = 0x1p-8f;
  constexpr float kTiny = 0x1p-126f;  // 15 times a scale that BF16 cannot hold
  double largest = 0;
  for (size_t i = 0; i < theirs.size(); ++i) {
    const float change = std::fabs(ours[i] - theirs[i]);
    if (!(change <= kBFloat16Step * std::fabs(theirs[i]) + kTiny)) {
      return InternalError("imported weight {}: {}, in the checkpoint {}", i, ours[i], theirs[i]);
    }
    if (theirs[i] != 0) {
      largest = std::max(largest,
                         static_cast<double>(change) / std::fabs(static_cast<double>(theirs[i])));
    }
  }
  return largest;
}

double SumOfSquaredDifferences(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    sum += difference * difference;
  }
  return sum;
}

// Outliers without calibration: the weights as they were, where the codes are the furthest off.
void AddOutliers(std::span<const float> weights, std::span<const float> dequantized,
                 const MatrixQuantizerOptions& options, MatrixState* state) {
  std::vector<float> scores(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    const float error = weights[i] - dequantized[i];
    scores[i] = (ToBFloat16(weights[i]).bits & 0x7fffu) == 0 ? -1.0f : error * error;
  }
  state->mask = SelectByScore(scores, state->n, state->k, options);
  state->values.assign(weights.begin(), weights.end());
}

}  // namespace

absl::StatusOr<int64_t> ImportedGroupSize(int64_t gptq_group_size) {
  for (const int64_t size : {-1, 32, 64, 128}) {
    if (gptq_group_size == size) return size;
  }
  if (gptq_group_size % kLargestGroup == 0) return kLargestGroup;
  return UnimplementedError(
      "group_size {}: its codes cannot be taken over (need 32, 64, a multiple of 128 or -1); name "
      "a "
      "--method to quantize its weights anew",
      gptq_group_size);
}

absl::StatusOr<ImportedMatrix> ImportGptqLayer(const GptqLayer& layer,
                                               std::span<const float> weights, bool has_original,
                                               const HessianFactor* factor,
                                               const MatrixQuantizerOptions& options) {
  if (options.symmetric &&
      std::any_of(layer.zeros.begin(), layer.zeros.end(), [](uint8_t zero) { return zero != 8; })) {
    return InvalidArgumentError("--symmetric: the checkpoint has zero points other than 8");
  }
  MatrixState state = StateOf(layer, options);
  ImportedMatrix result;
  result.matrix = MakeQuantizedMatrix(state);
  std::vector<float> dense = Dequantize(result.matrix);
  { FQ_ASSIGN_OR_RETURN(result.largest_change, LargestChange(layer.Dequantize(), dense)); }
  const double error_without = SumOfSquaredDifferences(weights, dense);
  if (has_original && RecordBudget(layer.n, layer.k, options) > 0) {
    if (factor != nullptr) {
      result.matrix = RefineMatrixGptq(weights, *factor, options, std::move(state));
    } else {
      AddOutliers(weights, dense, options, &state);
      result.matrix = MakeQuantizedMatrix(state);
    }
    dense = Dequantize(result.matrix);
  }
  const std::vector<float> zeros(weights.size(), 0.0f);
  result.matrix.energy = SumOfSquaredDifferences(weights, zeros);
  result.matrix.error_without = error_without;
  result.matrix.error_with = SumOfSquaredDifferences(weights, dense);
  return result;
}

}  // namespace flashquant
