// Two ways to the same two arrays, a (scale, zero) per group and a mask of outliers: for groups
// inside a tile the error curves of all groups, shared out exactly (group_plan.h); else by scores
// (row_plan.h).
#include "engine/quantize/matrix_quantizer.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "engine/quantize/group_curves.h"
#include "engine/quantize/group_plan.h"
#include "engine/quantize/int4_quantizer.h"
#include "engine/quantize/parallel_for.h"
#include "engine/quantize/row_plan.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/tile_coo.h"

namespace flashquant {
namespace {

constexpr int64_t kRowsPerTask = 8;

class MatrixQuantizer final {
 public:
  MatrixQuantizer(std::span<const float> weights, int64_t n, int64_t k,
                  const MatrixQuantizerOptions& options)
      : weights_(weights), n_(n), k_(k), options_(options) {
    group_ = options.group_size == -1 ? RoundUp<int64_t>(k, 2) : options.group_size;
    groups_per_row_ = CeilDiv(k, group_);
    params_.resize(static_cast<size_t>(n * groups_per_row_));
    mask_.assign(static_cast<size_t>(n * k), 0);
  }

  bool NeedsCurves() const {
    const bool groups_inside_tiles = options_.group_size != -1;
    return groups_inside_tiles && options_.rule == OutlierRule::kErrorWithRescale;
  }
  CurveProblem Problem() const { return MakeCurveProblem(weights_, n_, k_, options_, {}); }
  // `curves`: of Problem(), when they are needed.
  QuantizedMatrix Run(GroupCurves curves) {
    if (NeedsCurves()) {
      PlannedSearch(std::move(curves));
    } else {
      RowPlan plan = PlanByScore(weights_, n_, k_, options_, {});
      error_without_ = plan.error_without;
      params_ = std::move(plan.params);
      mask_ = std::move(plan.mask);
    }
    return Encode();
  }

 private:
  std::span<const float> Group(int64_t row, int64_t group) const {
    const int64_t begin = group * group_;
    const int64_t count = std::min(group_, k_ - begin);
    return weights_.subspan(static_cast<size_t>(row * k_ + begin), static_cast<size_t>(count));
  }
  GroupParams& Params(int64_t row, int64_t group) {
    return params_[static_cast<size_t>(row * groups_per_row_ + group)];
  }
  void ForRows(const std::function<void(int64_t row, GroupQuantizer& quantizer)>& body) {
    ParallelFor(options_.num_threads, n_, kRowsPerTask, [&](int64_t begin, int64_t end) {
      GroupQuantizer quantizer(options_.symmetric);
      for (int64_t row = begin; row < end; ++row) body(row, quantizer);
    });
  }

  void PlannedSearch(GroupCurves curves);
  QuantizedMatrix Encode();
  void EncodeRow(int64_t row, MatrixState* state, double* error) const;

  const std::span<const float> weights_;
  const int64_t n_;
  const int64_t k_;
  const MatrixQuantizerOptions options_;
  int64_t group_ = 0;
  int64_t groups_per_row_ = 0;

  std::vector<GroupParams> params_;  // [n, groups_per_row]
  std::vector<uint8_t> mask_;        // [n, k], 1 = outlier
  double error_without_ = 0;
};

void MatrixQuantizer::PlannedSearch(GroupCurves curves) {
  GroupPlan plan = PlanGroups(n_, k_, options_, {}, std::move(curves));
  error_without_ = plan.error_without;
  params_ = std::move(plan.params);
  ForRows([&](int64_t row, GroupQuantizer& quantizer) {
    std::vector<int32_t> chosen;
    for (int64_t group = 0; group < groups_per_row_; ++group) {
      const int32_t outliers = plan.outliers[static_cast<size_t>(row * groups_per_row_ + group)];
      GroupParams& params = Params(row, group);
      quantizer.Refine(Group(row, group), outliers, &params);
      quantizer.LargestErrors(Group(row, group), params, outliers, &chosen);
      for (const int32_t index : chosen) {
        mask_[static_cast<size_t>(row * k_ + group * group_ + index)] = 1;
      }
    }
  });
}

void MatrixQuantizer::EncodeRow(int64_t row, MatrixState* state, double* error) const {
  double sum = 0;
  for (int64_t k = 0; k < k_; ++k) {
    const GroupParams& params = params_[static_cast<size_t>(row * groups_per_row_ + k / group_)];
    const size_t at = static_cast<size_t>(row * k_ + k);
    double difference = 0;
    if (mask_[at] != 0) {
      difference = static_cast<double>(weights_[at] - ToFloat(ToBFloat16(weights_[at])));
    } else {
      const uint8_t code = EncodeInt4(weights_[at], params);
      state->codes[at] = code;
      difference = static_cast<double>(weights_[at] - ToFloat(params.scale) *
                                                          static_cast<float>(code - params.zero));
    }
    sum += difference * difference;
  }
  *error = sum;
}

QuantizedMatrix MatrixQuantizer::Encode() {
  MatrixState state;
  state.n = n_;
  state.k = k_;
  state.group_size = group_;
  state.symmetric = options_.symmetric;
  state.codes.resize(mask_.size());
  std::vector<double> row_errors(static_cast<size_t>(n_));
  ForRows([&](int64_t row, GroupQuantizer&) {
    EncodeRow(row, &state, &row_errors[static_cast<size_t>(row)]);
  });
  state.params = std::move(params_);
  state.mask = std::move(mask_);
  state.values.assign(weights_.begin(), weights_.end());
  QuantizedMatrix result = MakeQuantizedMatrix(state, options_.num_threads);
  for (const float weight : weights_) {
    result.energy += static_cast<double>(weight) * static_cast<double>(weight);
  }
  result.error_with = std::accumulate(row_errors.begin(), row_errors.end(), 0.0);
  result.error_without = error_without_;
  return result;
}

}  // namespace

int64_t RecordBudget(int64_t n, int64_t k, const MatrixQuantizerOptions& options) {
  const double density = options.least_benefit > 0 ? kMaxDensity : options.density;
  return static_cast<int64_t>(density * static_cast<double>(n) * static_cast<double>(k) /
                              kSlotsPerRecord);
}

QuantizedMatrix QuantizeMatrix(std::span<const float> weights, int64_t n, int64_t k,
                               const MatrixQuantizerOptions& options) {
  MatrixQuantizer quantizer(weights, n, k, options);
  return quantizer.Run(quantizer.NeedsCurves()
                           ? MakeGroupCurves(quantizer.Problem(), options.num_threads)
                           : GroupCurves());
}

absl::StatusOr<QuantizedMatrix> QuantizeMatrix(QuantizerOps* ops, std::span<const float> weights,
                                               int64_t n, int64_t k,
                                               const MatrixQuantizerOptions& options) {
  MatrixQuantizer quantizer(weights, n, k, options);
  GroupCurves curves;
  if (quantizer.NeedsCurves()) {
    FQ_ASSIGN_OR_RETURN(curves, ops->Curves(quantizer.Problem()));
  }
  return quantizer.Run(std::move(curves));
}

}  // namespace flashquant
