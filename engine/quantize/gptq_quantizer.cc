// Rows do not depend on each other, so a task takes a few of them through everything. Arrays of a
// task are [place][row]: one column's weights of all its rows lie side by side for the vector
// units.
#include "engine/quantize/gptq_quantizer.h"

#include <algorithm>
#include <vector>

#include "engine/quantize/gptq_rows.h"
#include "engine/quantize/group_plan.h"
#include "engine/quantize/parallel_for.h"
#include "kernels/base/check.h"
#include "kernels/base/math_util.h"

namespace flashquant {

QuantizedMatrix QuantizeMatrixGptq(std::span<const float> weights, int64_t n,
                                   const HessianFactor& factor,
                                   const MatrixQuantizerOptions& options) {
  const int64_t k = factor.k;
  FQ_CHECK(options.group_size == factor.group_size);
  const GroupPlan plan = PlanGroups(
      weights, n, k, options, {.within_group = factor.importance, .of_group = factor.group_cost});
  MatrixState state;
  state.n = n;
  state.k = k;
  state.group_size = options.group_size;
  state.symmetric = options.symmetric;
  state.params = plan.params;
  state.codes.resize(weights.size());
  state.mask.assign(weights.size(), 0);
  state.values.resize(weights.size());

  const int64_t num_tasks = CeilDiv(n, GptqRows::kRows);
  std::vector<GptqSums> sums(static_cast<size_t>(num_tasks));
  ParallelFor(options.num_threads, num_tasks, 1, [&](int64_t task, int64_t) {
    GptqRows rows(weights, factor, plan, task * GptqRows::kRows, &state);
    rows.Quantize();
    for (int sweep = 0; sweep < options.descent_sweeps; ++sweep) rows.Descend();
    sums[static_cast<size_t>(task)] = rows.Finish();
  });
  QuantizedMatrix result = MakeQuantizedMatrix(state);
  result.error_without = -1;
  result.output_error = 0;
  result.output_energy = 0;
  for (const GptqSums& part : sums) {
    result.energy += part.energy;
    result.error_with += part.error;
    result.output_error += part.output_error;
    result.output_energy += part.output_energy;
  }
  return result;
}

}  // namespace flashquant
