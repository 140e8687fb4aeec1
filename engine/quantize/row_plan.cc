#include "engine/quantize/row_plan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "engine/quantize/outlier_selector.h"
#include "engine/quantize/parallel_for.h"
#include "kernels/base/math_util.h"
#include "kernels/format/tile_coo.h"

namespace flashquant {
namespace {

constexpr int64_t kRowsPerTask = 8;
// The budget grows over the first rounds, because scales that still cover the outliers point at the
// wrong ones.
constexpr int kRampRounds = 4;
constexpr int kFullRounds = 4;

// From scores to whole records.
class ScoreSelector final {
 public:
  ScoreSelector(int64_t n, int64_t k, const MatrixQuantizerOptions& options)
      : n_(n),
        k_(k),
        options_(options),
        tiles_per_row_(CeilDiv<int64_t>(k, options.tile_k)),
        curve_length_(MaxSlots(0) / kSlotsPerRecord + 1) {}

  std::vector<uint8_t> Select(std::span<const float> scores, int64_t budget, double least_benefit) {
    curves_.assign(static_cast<size_t>(n_ * tiles_per_row_ * curve_length_),
                   std::numeric_limits<float>::infinity());
    ParallelFor(options_.num_threads, n_, kRowsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) RowCurves(scores, row);
    });
    const std::vector<int32_t> records = SelectRecords(
        curves_, curve_length_, budget, least_benefit * kSlotsPerRecord, options_.num_threads);
    std::vector<uint8_t> mask(scores.size(), 0);
    ParallelFor(options_.num_threads, n_, kRowsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) MaskRow(scores, row, records, &mask);
    });
    return mask;
  }

 private:
  int64_t TileRows(int64_t tile) const {
    return std::min<int64_t>(options_.tile_k, k_ - tile * options_.tile_k);
  }
  // Slots that a tile column may get: records without a null slot, and a quarter of its weights.
  int MaxSlots(int64_t tile) const {
    const int64_t quarter = std::min<int64_t>(TileRows(tile), options_.tile_k / 4);
    return static_cast<int>(quarter / kSlotsPerRecord * kSlotsPerRecord);
  }
  void RowCurves(std::span<const float> all_scores, int64_t row);
  void MaskRow(std::span<const float> scores, int64_t row, std::span<const int32_t> records,
               std::vector<uint8_t>* mask) const;

  const int64_t n_;
  const int64_t k_;
  const MatrixQuantizerOptions& options_;
  const int64_t tiles_per_row_;
  const int curve_length_;
  std::vector<float> curves_;  // [n, tiles_per_row, curve_length]
};

void ScoreSelector::RowCurves(std::span<const float> all_scores, int64_t row) {
  const std::span<const float> row_scores =
      all_scores.subspan(static_cast<size_t>(row * k_), static_cast<size_t>(k_));
  std::vector<float> scores(row_scores.begin(), row_scores.end());
  for (int64_t tile = 0; tile < tiles_per_row_; ++tile) {
    const auto begin = scores.begin() + tile * options_.tile_k;
    const auto end = begin + TileRows(tile);
    std::sort(begin, end, std::greater<>());
    double left = std::accumulate(begin, end, 0.0, [](double sum, float score) {
      return sum + std::max(0.0, static_cast<double>(score));
    });
    float* curve = curves_.data() + (row * tiles_per_row_ + tile) * curve_length_;
    curve[0] = static_cast<float>(left);
    for (int record = 0; (record + 1) * kSlotsPerRecord <= MaxSlots(tile); ++record) {
      for (int slot = 0; slot < kSlotsPerRecord; ++slot) {
        const float score = *(begin + record * kSlotsPerRecord + slot);
        left =
            score < 0 ? std::numeric_limits<double>::infinity() : left - static_cast<double>(score);
      }
      if (left == std::numeric_limits<double>::infinity()) break;
      curve[record + 1] = static_cast<float>(left);
    }
  }
}

void ScoreSelector::MaskRow(std::span<const float> scores, int64_t row,
                            std::span<const int32_t> records, std::vector<uint8_t>* mask) const {
  std::vector<int64_t> order;
  for (int64_t tile = 0; tile < tiles_per_row_; ++tile) {
    const int64_t slots =
        int64_t{records[static_cast<size_t>(row * tiles_per_row_ + tile)]} * kSlotsPerRecord;
    order.resize(static_cast<size_t>(TileRows(tile)));
    std::iota(order.begin(), order.end(), row * k_ + tile * options_.tile_k);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    for (int64_t i = 0; i < slots; ++i) {
      (*mask)[static_cast<size_t>(order[static_cast<size_t>(i)])] = 1;
    }
  }
}

class ScoreSearch final {
 public:
  ScoreSearch(std::span<const float> weights, int64_t n, int64_t k,
              const MatrixQuantizerOptions& options, const ColumnImportance& importance)
      : weights_(weights),
        n_(n),
        k_(k),
        options_(options),
        importance_(importance),
        factor_scale_(FactorScale(importance)),
        group_(options.group_size == -1 ? RoundUp<int64_t>(k, 2) : options.group_size),
        groups_per_row_(CeilDiv(k, group_)),
        budget_(RecordBudget(n, k, options)),
        selector_(n, k, options) {
    plan_.params.resize(static_cast<size_t>(n * groups_per_row_));
    plan_.mask.assign(static_cast<size_t>(n * k), 0);
  }

  RowPlan Run();

 private:
  std::span<const float> Group(int64_t row, int64_t group) const {
    const int64_t begin = group * group_;
    const int64_t count = std::min(group_, k_ - begin);
    return weights_.subspan(static_cast<size_t>(row * k_ + begin), static_cast<size_t>(count));
  }
  void ForRows(const std::function<void(int64_t row, GroupQuantizer& quantizer)>& body) {
    ParallelFor(options_.num_threads, n_, kRowsPerTask, [&](int64_t begin, int64_t end) {
      GroupQuantizer quantizer(options_.symmetric);
      for (int64_t row = begin; row < end; ++row) body(row, quantizer);
    });
  }
  double FitAll();
  double FitRow(int64_t row, GroupQuantizer& quantizer);
  void ScoreRow(int64_t row);

  const std::span<const float> weights_;
  const int64_t n_;
  const int64_t k_;
  const MatrixQuantizerOptions& options_;
  const ColumnImportance& importance_;
  const double factor_scale_;
  const int64_t group_;
  const int64_t groups_per_row_;
  const int64_t budget_;  // records
  ScoreSelector selector_;
  RowPlan plan_;
  std::vector<float> scores_;  // [n, k]
};

// Fits the groups of a row without the masked weights; returns the cost of the rest's errors.
double ScoreSearch::FitRow(int64_t row, GroupQuantizer& quantizer) {
  double error = 0;
  std::vector<float> kept;
  std::vector<float> importance;
  for (int64_t group = 0; group < groups_per_row_; ++group) {
    const std::span<const float> weights = Group(row, group);
    const std::span<const float> all = importance_.Group(group * group_, weights.size());
    kept.clear();
    importance.clear();
    for (size_t i = 0; i < weights.size(); ++i) {
      if (plan_.mask[static_cast<size_t>(row * k_ + group * group_) + i] != 0) continue;
      kept.push_back(weights[i]);
      if (!all.empty()) importance.push_back(all[i]);
    }
    quantizer.SetImportance(importance);
    const GroupParams params = kept.empty() ? GroupParams{} : quantizer.Fit(kept);
    plan_.params[static_cast<size_t>(row * groups_per_row_ + group)] = params;
    error += importance_.GroupFactor(group) * quantizer.Error(kept, params, 0);
  }
  return error;
}

double ScoreSearch::FitAll() {
  std::vector<double> row_errors(static_cast<size_t>(n_));
  ForRows([&](int64_t row, GroupQuantizer& quantizer) {
    row_errors[static_cast<size_t>(row)] = FitRow(row, quantizer);
  });
  return std::accumulate(row_errors.begin(), row_errors.end(), 0.0);
}

void ScoreSearch::ScoreRow(int64_t row) {
  const size_t first = static_cast<size_t>(row * k_);
  const std::span<float> scores = std::span<float>(scores_).subspan(first, static_cast<size_t>(k_));
  for (int64_t group = 0; group < groups_per_row_; ++group) {
    const std::span<const float> part = Group(row, group);
    const std::span<float> out = scores.subspan(static_cast<size_t>(group * group_), part.size());
    if (options_.rule == OutlierRule::kMagnitude) {
      for (size_t i = 0; i < out.size(); ++i) out[i] = part[i] * part[i];
      continue;
    }
    SquaredErrors(part, plan_.params[static_cast<size_t>(row * groups_per_row_ + group)], out);
    const std::span<const float> importance = importance_.Group(group * group_, part.size());
    if (importance.empty()) continue;
    const float factor = static_cast<float>(importance_.GroupFactor(group) * factor_scale_);
    for (size_t i = 0; i < out.size(); ++i) out[i] *= importance[i] * factor;
  }
  for (size_t i = 0; i < scores.size(); ++i) {
    if (IsZeroInBFloat16(weights_[first + i])) scores[i] = -1;  // gets no slot
  }
}

RowPlan ScoreSearch::Run() {
  double best_error = FitAll();  // without outliers
  plan_.error_without = best_error;
  if (budget_ == 0) return std::move(plan_);
  const int ramp = options_.rule == OutlierRule::kErrorWithRescale ? kRampRounds : 0;
  const int rounds = ramp > 0 ? ramp + kFullRounds : 1;
  const double least_benefit = options_.least_benefit * factor_scale_;
  scores_.resize(weights_.size());
  RowPlan best;
  for (int round = 0; round < rounds; ++round) {
    ForRows([&](int64_t row, GroupQuantizer&) { ScoreRow(row); });
    const int64_t budget = round < ramp ? budget_ * (round + 1) / (ramp + 1) : budget_;
    plan_.mask = selector_.Select(scores_, budget, least_benefit);
    const double error = FitAll();
    if (round < ramp) continue;
    if (round > ramp && error >= best_error) break;
    best_error = error;
    best = plan_;
  }
  return best;
}

}  // namespace

RowPlan PlanByScore(std::span<const float> weights, int64_t n, int64_t k,
                    const MatrixQuantizerOptions& options, const ColumnImportance& importance) {
  return ScoreSearch(weights, n, k, options, importance).Run();
}

std::vector<uint8_t> SelectByScore(std::span<const float> scores, int64_t n, int64_t k,
                                   const MatrixQuantizerOptions& options) {
  return ScoreSelector(n, k, options)
      .Select(scores, RecordBudget(n, k, options), options.least_benefit);
}

}  // namespace flashquant
