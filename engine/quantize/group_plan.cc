#include "engine/quantize/group_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "engine/quantize/parallel_for.h"
#include "kernels/base/math_util.h"
#include "kernels/format/tile_coo.h"

namespace flashquant {
namespace {

constexpr int64_t kRowsPerTask = 8;
constexpr double kMaxGroupFactor = 1024;

// Numbers of outliers that a group's curve has, none included.
int64_t CurveLength(const MatrixQuantizerOptions& options, int64_t budget) {
  if (budget == 0) return 1;
  // Room for groups that want several times their share.
  const double density = options.least_benefit > 0 ? kMaxDensity / 4 : options.density;
  const double share = density * static_cast<double>(options.group_size);
  return std::min<int64_t>(options.group_size / 4, std::lround(4 * share) + 8) + 1;
}

class GroupPlanner final {
 public:
  GroupPlanner(int64_t n, int64_t k, const MatrixQuantizerOptions& options,
               const ColumnImportance& importance, GroupCurves curves)
      : n_(n),
        k_(k),
        options_(options),
        factor_scale_(FactorScale(importance)),
        groups_per_row_(CeilDiv(k, options.group_size)),
        groups_per_tile_(options.tile_k / options.group_size),
        tiles_per_row_(CeilDiv<int64_t>(k, options.tile_k)),
        budget_(RecordBudget(n, k, options)),
        curve_length_(static_cast<size_t>(CurveLength(options, budget_))),
        column_curve_length_(budget_ > 0 ? static_cast<size_t>(MaxSlots(0) / kSlotsPerRecord) + 1
                                         : 1),
        curves_(std::move(curves)) {
    column_curves_.assign(static_cast<size_t>(n * tiles_per_row_) * column_curve_length_,
                          std::numeric_limits<float>::infinity());
  }

  std::vector<double> Errors(std::span<const int64_t> num_records) {
    JoinCurves();
    std::vector<double> errors;
    for (const int64_t budget : num_records) {
      const std::vector<int32_t> records = SelectRecords(
          column_curves_, static_cast<int>(column_curve_length_), budget, 0, options_.num_threads);
      double sum = 0;
      for (size_t column = 0; column < records.size(); ++column) {
        sum += static_cast<double>(
            column_curves_[column * column_curve_length_ + static_cast<size_t>(records[column])]);
      }
      errors.push_back(sum / factor_scale_);
    }
    return errors;
  }

  GroupPlan Run() {
    JoinCurves();
    const std::vector<int32_t> records = SelectRecords(
        column_curves_, static_cast<int>(column_curve_length_), budget_,
        options_.least_benefit * kSlotsPerRecord * factor_scale_, options_.num_threads);
    GroupPlan plan;
    plan.groups_per_row = groups_per_row_;
    plan.params.resize(static_cast<size_t>(n_ * groups_per_row_));
    plan.outliers.assign(static_cast<size_t>(n_ * groups_per_row_), 0);
    ParallelFor(options_.num_threads, n_, kRowsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) SplitRow(row, records, &plan);
    });
    // Row by row, so that the sum has the same bits however the matrix is cut.
    for (auto row = curves_.error_without.begin(); row != curves_.error_without.end();
         row += groups_per_row_) {
      plan.error_without += std::accumulate(row, row + groups_per_row_, 0.0);
    }
    return plan;
  }

 private:
  // Slots that a tile column may get: records without a null slot, and a quarter of its weights.
  int MaxSlots(int64_t tile) const {
    const int64_t rows = std::min<int64_t>(options_.tile_k, k_ - tile * options_.tile_k);
    const int64_t quarter = std::min<int64_t>(rows, options_.tile_k / 4);
    return static_cast<int>(quarter / kSlotsPerRecord * kSlotsPerRecord);
  }
  size_t CurveOf(int64_t row, int64_t group) const {
    return static_cast<size_t>(row * groups_per_row_ + group) * curve_length_;
  }
  // Joins the curves of a tile column's groups.
  void Combine(int64_t row, int64_t tile, int max_slots, SlotSplitter* splitter) const {
    const int64_t first = tile * groups_per_tile_;
    const int64_t count = std::min(groups_per_tile_, groups_per_row_ - first);
    splitter->Combine(std::span<const float>(curves_.errors)
                          .subspan(CurveOf(row, first), static_cast<size_t>(count) * curve_length_),
                      static_cast<int>(count), static_cast<int>(curve_length_), max_slots);
  }

  // The curves of all tile columns.
  void JoinCurves() {
    ParallelFor(options_.num_threads, n_, kRowsPerTask, [&](int64_t begin, int64_t end) {
      SlotSplitter splitter;
      for (int64_t row = begin; row < end; ++row) JoinRow(row, &splitter);
    });
  }
  void JoinRow(int64_t row, SlotSplitter* splitter);
  void SplitRow(int64_t row, std::span<const int32_t> records, GroupPlan* plan) const;

  const int64_t n_;
  const int64_t k_;
  const MatrixQuantizerOptions& options_;
  const double factor_scale_;
  const int64_t groups_per_row_;
  const int64_t groups_per_tile_;
  const int64_t tiles_per_row_;
  const int64_t budget_;
  const size_t curve_length_;
  const size_t column_curve_length_;
  const GroupCurves curves_;
  std::vector<float> column_curves_;  // [n, tiles_per_row, column_curve_length]
};

void GroupPlanner::JoinRow(int64_t row, SlotSplitter* splitter) {
  for (int64_t tile = 0; tile < tiles_per_row_; ++tile) {
    const int max_slots =
        std::min(MaxSlots(tile), static_cast<int>(column_curve_length_ - 1) * kSlotsPerRecord);
    Combine(row, tile, max_slots, splitter);
    float* curve = column_curves_.data() +
                   static_cast<size_t>(row * tiles_per_row_ + tile) * column_curve_length_;
    for (int record = 0; record * kSlotsPerRecord <= max_slots; ++record) {
      curve[record] = static_cast<float>(splitter->error(record * kSlotsPerRecord));
    }
  }
}

void GroupPlanner::SplitRow(int64_t row, std::span<const int32_t> records, GroupPlan* plan) const {
  SlotSplitter splitter;
  for (int64_t tile = 0; tile < tiles_per_row_; ++tile) {
    const int64_t first = tile * groups_per_tile_;
    const int64_t count = std::min(groups_per_tile_, groups_per_row_ - first);
    const int slots = records[static_cast<size_t>(row * tiles_per_row_ + tile)] * kSlotsPerRecord;
    Combine(row, tile, slots, &splitter);
    const std::span<int32_t> split =
        std::span<int32_t>(plan->outliers)
            .subspan(static_cast<size_t>(row * groups_per_row_ + first),
                     static_cast<size_t>(count));
    splitter.Split(slots, split);
    for (int64_t i = 0; i < count; ++i) {
      plan->params[static_cast<size_t>(row * groups_per_row_ + first + i)] =
          curves_
              .params[CurveOf(row, first + i) + static_cast<size_t>(split[static_cast<size_t>(i)])];
    }
  }
}

}  // namespace

double FactorScale(const ColumnImportance& importance) {
  double largest = 0;
  for (const double factor : importance.of_group) largest = std::max(largest, factor);
  if (!(largest > kMaxGroupFactor) || !std::isfinite(largest)) return 1;
  return std::exp2(-std::ceil(std::log2(largest / kMaxGroupFactor)));
}

CurveProblem MakeCurveProblem(std::span<const float> weights, int64_t n, int64_t k,
                              const MatrixQuantizerOptions& options,
                              const ColumnImportance& importance) {
  return {.weights = weights,
          .n = n,
          .k = k,
          .group_size = options.group_size,
          .symmetric = options.symmetric,
          .length = CurveLength(options, RecordBudget(n, k, options)),
          .importance = importance.within_group,
          .group_factor = importance.of_group,
          .factor_scale = FactorScale(importance)};
}

GroupPlan PlanGroups(int64_t n, int64_t k, const MatrixQuantizerOptions& options,
                     const ColumnImportance& importance, GroupCurves curves) {
  return GroupPlanner(n, k, options, importance, std::move(curves)).Run();
}

std::vector<double> ErrorsWithRecords(int64_t n, int64_t k, const MatrixQuantizerOptions& options,
                                      const ColumnImportance& importance, GroupCurves curves,
                                      std::span<const int64_t> num_records) {
  return GroupPlanner(n, k, options, importance, std::move(curves)).Errors(num_records);
}

}  // namespace flashquant
