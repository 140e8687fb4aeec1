// Rows do not depend on each other, so a task takes a few of them through everything. Arrays of a
// task are [place][row]: one column's weights of all its rows lie side by side for the vector
// units.
#include "engine/quantize/gptq_quantizer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/quantize/gptq_rows.h"
#include "engine/quantize/group_plan.h"
#include "engine/quantize/parallel_for.h"
#include "engine/quantize/row_plan.h"
#include "kernels/base/check.h"
#include "kernels/base/math_util.h"

namespace flashquant {
namespace {

GroupPlan PlanOutliers(std::span<const float> weights, int64_t n, const HessianFactor& factor,
                       const MatrixQuantizerOptions& options) {
  const ColumnImportance importance = {.within_group = factor.importance,
                                       .of_group = factor.group_cost};
  if (options.group_size != -1) return PlanGroups(weights, n, factor.k, options, importance);
  // All of a row is one group, of which nothing is compensated yet when it is fitted: which weights
  // are outliers can be said before.
  MatrixQuantizerOptions by_score = options;
  by_score.rule = OutlierRule::kErrorWithRescale;
  RowPlan rows = PlanByScore(weights, n, factor.k, by_score, importance);
  GroupPlan plan;
  plan.groups_per_row = 1;
  plan.params = std::move(rows.params);
  plan.mask = std::move(rows.mask);
  return plan;
}

// Runs `body` for every task's rows and joins what they sum up to.
template <typename Body>
QuantizedMatrix RunRows(std::span<const float> weights, const HessianFactor& factor,
                        const GroupPlan& plan, int num_threads, MatrixState* state,
                        const Body& body) {
  const int64_t num_tasks = CeilDiv(state->n, GptqRows::kRows);
  std::vector<GptqSums> sums(static_cast<size_t>(num_tasks));
  ParallelFor(num_threads, num_tasks, 1, [&](int64_t task, int64_t) {
    GptqRows rows(weights, factor, plan, task * GptqRows::kRows, state);
    body(rows);
    sums[static_cast<size_t>(task)] = rows.Finish();
  });
  QuantizedMatrix result = MakeQuantizedMatrix(*state);
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

}  // namespace

QuantizedMatrix QuantizeMatrixGptq(std::span<const float> weights, int64_t n,
                                   const HessianFactor& factor,
                                   const MatrixQuantizerOptions& options) {
  MatrixState state;
  state.n = n;
  state.k = factor.k;
  state.group_size = options.group_size == -1 ? RoundUp<int64_t>(factor.k, 2) : options.group_size;
  FQ_CHECK(state.group_size == factor.group_size);
  const GroupPlan plan = PlanOutliers(weights, n, factor, options);
  state.symmetric = options.symmetric;
  state.params = plan.params;
  state.codes.resize(weights.size());
  state.mask.assign(weights.size(), 0);
  state.values.resize(weights.size());
  return RunRows(weights, factor, plan, options.num_threads, &state, [&](GptqRows& rows) {
    rows.Quantize();
    for (int sweep = 0; sweep < options.descent_sweeps; ++sweep) rows.Descend();
  });
}

QuantizedMatrix RefineMatrixGptq(std::span<const float> weights, const HessianFactor& factor,
                                 const MatrixQuantizerOptions& options, MatrixState state) {
  FQ_CHECK(state.group_size == factor.group_size && state.k == factor.k);
  const GroupPlan plan;
  const int sweeps = std::max(1, options.descent_sweeps);
  state.values.assign(weights.size(), 0.0f);
  std::vector<float> gains(weights.size());
  // Half of the outliers first: with them in place, others than at the start are the worst.
  for (const double share : {0.5, 1.0}) {
    ParallelFor(options.num_threads, CeilDiv(state.n, GptqRows::kRows), 1,
                [&](int64_t task, int64_t) {
                  GptqRows rows(weights, factor, plan, task * GptqRows::kRows, &state);
                  rows.Load();
                  for (int sweep = 0; sweep < sweeps; ++sweep) rows.Descend();
                  rows.OutlierGains(gains);
                  rows.Finish();
                });
    MatrixQuantizerOptions part = options;
    part.density *= share;
    state.mask = SelectByScore(gains, state.n, state.k, part);
  }
  return RunRows(weights, factor, plan, options.num_threads, &state, [&](GptqRows& rows) {
    rows.Load();
    for (int sweep = 0; sweep < sweeps; ++sweep) rows.Descend();
  });
}

}  // namespace flashquant
