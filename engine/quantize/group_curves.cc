#include "engine/quantize/group_curves.h"

#include <algorithm>
#include <cmath>

#include "engine/quantize/int4_quantizer.h"
#include "engine/quantize/parallel_for.h"

namespace flashquant {
namespace {

constexpr int64_t kRowsPerTask = 8;

void RowCurves(const CurveProblem& problem, int64_t row, GroupQuantizer& quantizer,
               GroupCurves* curves) {
  const size_t length = static_cast<size_t>(problem.length);
  std::vector<double> errors(length);
  for (int64_t group = 0; group < problem.groups_per_row(); ++group) {
    const int64_t begin = group * problem.group_size;
    const size_t count = static_cast<size_t>(std::min(problem.group_size, problem.k - begin));
    const std::span<const float> weights =
        problem.weights.subspan(static_cast<size_t>(row * problem.k + begin), count);
    const size_t index = static_cast<size_t>(row * problem.groups_per_row() + group);
    const std::span<GroupParams> params(curves->params.data() + index * length, length);
    quantizer.SetImportance(problem.importance.empty()
                                ? problem.importance
                                : problem.importance.subspan(static_cast<size_t>(begin), count));
    quantizer.ErrorCurve(weights, errors, params);
    errors[0] = quantizer.Refine(weights, 0, &params[0]);
    const double factor =
        problem.group_factor.empty() ? 1.0 : problem.group_factor[static_cast<size_t>(group)];
    curves->error_without[index] = factor * errors[0];
    for (size_t j = 0; j < length; ++j) {
      curves->errors[index * length + j] = static_cast<float>(
          factor * problem.factor_scale *
          (std::isfinite(errors[j]) ? std::min(errors[j], errors[0]) : errors[j]));
    }
  }
}

}  // namespace

GroupCurves MakeGroupCurves(const CurveProblem& problem, int num_threads) {
  GroupCurves curves;
  const size_t groups = static_cast<size_t>(problem.n * problem.groups_per_row());
  curves.errors.resize(groups * static_cast<size_t>(problem.length));
  curves.params.resize(curves.errors.size());
  curves.error_without.resize(groups);
  ParallelFor(num_threads, problem.n, kRowsPerTask, [&](int64_t begin, int64_t end) {
    GroupQuantizer quantizer(problem.symmetric);
    for (int64_t row = begin; row < end; ++row) RowCurves(problem, row, quantizer, &curves);
  });
  return curves;
}

}  // namespace flashquant
