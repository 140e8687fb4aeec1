// Rows do not depend on each other, so a task takes a few of them through everything. Arrays of a
// task are [place][row]: one column's weights of all its rows lie side by side for the vector
// units.
#include "engine/quantize/gptq_quantizer.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "engine/quantize/gptq_rows.h"
#include "engine/quantize/group_curves.h"
#include "engine/quantize/group_plan.h"
#include "engine/quantize/parallel_for.h"
#include "engine/quantize/row_plan.h"
#include "kernels/base/check.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

ColumnImportance ImportanceOf(const ColumnCosts& costs) {
  return {.within_group = costs.importance, .of_group = costs.group_cost};
}

// How many outliers each group gets, or which; `curves` are only asked for where they are needed.
using MakeCurves = std::function<absl::StatusOr<GroupCurves>(const CurveProblem&)>;
absl::StatusOr<GroupPlan> PlanOutliers(std::span<const float> weights, int64_t n,
                                       const ColumnCosts& costs,
                                       const MatrixQuantizerOptions& options,
                                       const MakeCurves& make_curves) {
  const ColumnImportance importance = ImportanceOf(costs);
  if (options.group_size != -1) {
    FQ_ASSIGN_OR_RETURN(GroupCurves curves,
                        make_curves(MakeCurveProblem(weights, n, costs.k, options, importance)));
    return PlanGroups(n, costs.k, options, importance, std::move(curves));
  }
  // All of a row is one group, of which nothing is compensated yet when it is fitted: which weights
  // are outliers can be said before.
  MatrixQuantizerOptions by_score = options;
  by_score.rule = OutlierRule::kErrorWithRescale;
  RowPlan rows = PlanByScore(weights, n, costs.k, by_score, importance);
  GroupPlan plan;
  plan.groups_per_row = 1;
  plan.params = std::move(rows.params);
  plan.mask = std::move(rows.mask);
  return plan;
}

RowsProblem MakeRowsProblem(std::span<const float> weights, int64_t n, const ColumnCosts& costs,
                            const MatrixQuantizerOptions& options, const GroupPlan& plan) {
  RowsProblem problem;
  problem.weights = weights;
  problem.n = n;
  problem.k = costs.k;
  problem.group_size = costs.group_size;
  problem.symmetric = options.symmetric;
  problem.descent_sweeps = options.descent_sweeps;
  problem.importance = costs.importance;
  problem.params = plan.params;
  problem.outliers = plan.outliers;
  problem.mask = plan.mask;
  return problem;
}

QuantizedMatrix WithSums(QuantizedMatrix matrix, const GptqSums& sums) {
  matrix.error_without = -1;
  matrix.energy = sums.energy;
  matrix.error_with = sums.error;
  matrix.output_energy = sums.output_energy;
  matrix.output_error = sums.output_error;
  return matrix;
}

QuantizedMatrix FromSolved(const RowsProblem& problem, const SolvedRows& rows, int num_threads) {
  return WithSums(MakeQuantizedMatrix(problem, rows, num_threads),
                  {.energy = rows.energy,
                   .error = rows.error,
                   .output_energy = rows.output_energy,
                   .output_error = rows.output_error});
}

// Runs `body` for every task's rows and joins what they sum up to.
template <typename Body>
GptqSums RunRows(std::span<const float> weights, const HessianFactor& factor, const GroupPlan& plan,
                 int num_threads, MatrixState* state, const Body& body) {
  const int64_t num_tasks = CeilDiv(state->n, GptqRows::kRows);
  std::vector<GptqSums> sums(static_cast<size_t>(num_tasks));
  ParallelFor(num_threads, num_tasks, 1, [&](int64_t task, int64_t) {
    GptqRows rows(weights, factor, plan, task * GptqRows::kRows, state);
    body(rows);
    sums[static_cast<size_t>(task)] = rows.Finish();
  });
  GptqSums total;
  for (const GptqSums& part : sums) {
    total.energy += part.energy;
    total.error += part.error;
    total.output_error += part.output_error;
    total.output_energy += part.output_energy;
  }
  return total;
}

}  // namespace

SolvedRows SolveRowsOnCpu(const RowsProblem& problem, const HessianFactor& factor,
                          int num_threads) {
  FQ_CHECK(problem.group_size == factor.group_size && problem.k == factor.k);
  GroupPlan plan;
  plan.groups_per_row = problem.groups_per_row();
  plan.outliers.assign(problem.outliers.begin(), problem.outliers.end());
  plan.mask.assign(problem.mask.begin(), problem.mask.end());
  MatrixState state;
  state.n = problem.n;
  state.k = problem.k;
  state.group_size = problem.group_size;
  state.symmetric = problem.symmetric;
  state.params.assign(problem.params.begin(), problem.params.end());
  state.codes.resize(problem.weights.size());
  state.mask.assign(problem.weights.size(), 0);
  state.values.resize(problem.weights.size());
  const GptqSums sums =
      RunRows(problem.weights, factor, plan, num_threads, &state, [&](GptqRows& rows) {
        rows.Quantize();
        for (int sweep = 0; sweep < problem.descent_sweeps; ++sweep) rows.Descend();
      });
  SolvedRows solved;
  solved.params = std::move(state.params);
  solved.codes = std::move(state.codes);
  for (size_t i = 0; i < solved.codes.size(); ++i) {
    if (state.mask[i] == 0) continue;
    solved.codes[i] = kOutlierCode;
    solved.outliers.push_back(ToBFloat16(state.values[i]));
  }
  solved.energy = sums.energy;
  solved.error = sums.error;
  solved.output_energy = sums.output_energy;
  solved.output_error = sums.output_error;
  return solved;
}

QuantizedMatrix QuantizeMatrixGptq(std::span<const float> weights, int64_t n,
                                   const HessianFactor& factor,
                                   const MatrixQuantizerOptions& options) {
  const absl::StatusOr<GroupPlan> plan = PlanOutliers(
      weights, n, factor, options,
      [&](const CurveProblem& problem) { return MakeGroupCurves(problem, options.num_threads); });
  FQ_CHECK(plan.ok());  // these curves cannot fail
  const RowsProblem problem = MakeRowsProblem(weights, n, factor, options, *plan);
  return FromSolved(problem, SolveRowsOnCpu(problem, factor, options.num_threads),
                    options.num_threads);
}

absl::StatusOr<QuantizedMatrix> QuantizeMatrixGptq(QuantizerOps* ops,
                                                   std::span<const float> weights, int64_t n,
                                                   const ColumnCosts& costs,
                                                   const MatrixQuantizerOptions& options) {
  FQ_ASSIGN_OR_RETURN(const GroupPlan plan,
                      PlanOutliers(weights, n, costs, options, [&](const CurveProblem& problem) {
                        return ops->Curves(problem);
                      }));
  const RowsProblem problem = MakeRowsProblem(weights, n, costs, options, plan);
  FQ_ASSIGN_OR_RETURN(SolvedRows solved, ops->SolveRows(problem));
  return FromSolved(problem, solved, options.num_threads);
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
  const GptqSums sums =
      RunRows(weights, factor, plan, options.num_threads, &state, [&](GptqRows& rows) {
        rows.Load();
        for (int sweep = 0; sweep < sweeps; ++sweep) rows.Descend();
      });
  return WithSums(MakeQuantizedMatrix(state, options.num_threads), sums);
}

}  // namespace flashquant
