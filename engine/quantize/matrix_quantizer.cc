// Two ways to the same two arrays, a (scale, zero) per group and a mask of outliers:
// - PlannedSearch: groups inside a tile. Error curves of all groups, shared out exactly
//   (group_plan.h).
// - ScoreSearch: one group per row, whose outliers sit in several tiles (and the two simpler
// rules):
//   select by score at the present scales, refit, and again while it gets better.
#include "engine/quantize/matrix_quantizer.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "engine/quantize/group_plan.h"
#include "engine/quantize/int4_quantizer.h"
#include "engine/quantize/parallel_for.h"
#include "kernels/base/math_util.h"
#include "kernels/format/tile_coo.h"

namespace flashquant {
namespace {

constexpr int64_t kRowsPerTask = 8;
// Rounds of ScoreSearch: the budget grows over the first ones, because scales that still cover the
// outliers point at the wrong ones.
constexpr int kRampRounds = 4;
constexpr int kFullRounds = 4;

class MatrixQuantizer final {
 public:
  MatrixQuantizer(std::span<const float> weights, int64_t n, int64_t k,
                  const MatrixQuantizerOptions& options)
      : weights_(weights), n_(n), k_(k), options_(options) {
    group_ = options.group_size == -1 ? RoundUp<int64_t>(k, 2) : options.group_size;
    groups_per_row_ = CeilDiv(k, group_);
    tiles_per_row_ = CeilDiv<int64_t>(k, options.tile_k);
    budget_ = RecordBudget(n, k, options);
    params_.resize(static_cast<size_t>(n * groups_per_row_));
    mask_.assign(static_cast<size_t>(n * k), 0);
  }

  QuantizedMatrix Run() {
    const bool groups_inside_tiles = options_.group_size != -1;
    if (groups_inside_tiles && options_.rule == OutlierRule::kErrorWithRescale) {
      PlannedSearch();
    } else {
      ScoreSearch();
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
  int64_t TileRows(int64_t tile) const {
    return std::min<int64_t>(options_.tile_k, k_ - tile * options_.tile_k);
  }
  // Slots that a tile column may get: records without a null slot, and a quarter of its weights.
  int MaxSlots(int64_t tile) const {
    const int64_t quarter = std::min<int64_t>(TileRows(tile), options_.tile_k / 4);
    return static_cast<int>(quarter / kSlotsPerRecord * kSlotsPerRecord);
  }
  void ForRows(const std::function<void(int64_t row, GroupQuantizer& quantizer)>& body) {
    ParallelFor(options_.num_threads, n_, kRowsPerTask, [&](int64_t begin, int64_t end) {
      GroupQuantizer quantizer(options_.symmetric);
      for (int64_t row = begin; row < end; ++row) body(row, quantizer);
    });
  }

  void PlannedSearch();

  void ScoreSearch();
  double FitRow(int64_t row, GroupQuantizer& quantizer);
  void ScoreRow(int64_t row, std::span<float> curves) const;
  void MaskRow(int64_t row, std::span<const int32_t> records);
  std::vector<float> Scores(int64_t row) const;

  QuantizedMatrix Encode();
  void EncodeRow(int64_t row, MatrixState* state, double* error) const;

  const std::span<const float> weights_;
  const int64_t n_;
  const int64_t k_;
  const MatrixQuantizerOptions options_;
  int64_t group_ = 0;
  int64_t groups_per_row_ = 0;
  int64_t tiles_per_row_ = 0;
  int64_t budget_ = 0;  // records

  std::vector<GroupParams> params_;  // [n, groups_per_row]
  std::vector<uint8_t> mask_;        // [n, k], 1 = outlier
  double error_without_ = 0;
  int column_curve_length_ = 1;
  std::vector<float> column_curves_;  // [n, tiles_per_row, column_curve_length_]
};

void MatrixQuantizer::PlannedSearch() {
  GroupPlan plan = PlanGroups(weights_, n_, k_, options_, {});
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

// Fits the groups of a row without the masked weights; returns the error of the rest.
double MatrixQuantizer::FitRow(int64_t row, GroupQuantizer& quantizer) {
  double error = 0;
  std::vector<float> kept;
  for (int64_t group = 0; group < groups_per_row_; ++group) {
    const std::span<const float> weights = Group(row, group);
    kept.clear();
    for (size_t i = 0; i < weights.size(); ++i) {
      if (mask_[static_cast<size_t>(row * k_ + group * group_) + i] == 0)
        kept.push_back(weights[i]);
    }
    const GroupParams params = kept.empty() ? GroupParams{} : quantizer.Fit(kept);
    Params(row, group) = params;
    error += quantizer.Error(kept, params, 0);
  }
  return error;
}

std::vector<float> MatrixQuantizer::Scores(int64_t row) const {
  std::vector<float> scores(static_cast<size_t>(k_));
  const std::span<const float> weights =
      weights_.subspan(static_cast<size_t>(row * k_), static_cast<size_t>(k_));
  if (options_.rule == OutlierRule::kMagnitude) {
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = weights[i] * weights[i];
  } else {
    for (int64_t group = 0; group < groups_per_row_; ++group) {
      const std::span<const float> part = Group(row, group);
      SquaredErrors(
          part, params_[static_cast<size_t>(row * groups_per_row_ + group)],
          std::span<float>(scores).subspan(static_cast<size_t>(group * group_), part.size()));
    }
  }
  for (size_t i = 0; i < scores.size(); ++i) {
    if ((ToBFloat16(weights[i]).bits & 0x7fffu) == 0) scores[i] = -1;  // gets no slot
  }
  return scores;
}

void MatrixQuantizer::ScoreRow(int64_t row, std::span<float> curves) const {
  std::vector<float> scores = Scores(row);
  for (int64_t tile = 0; tile < tiles_per_row_; ++tile) {
    const auto begin = scores.begin() + tile * options_.tile_k;
    const auto end = begin + TileRows(tile);
    std::sort(begin, end, std::greater<>());
    double left = std::accumulate(begin, end, 0.0, [](double sum, float score) {
      return sum + std::max(0.0, static_cast<double>(score));
    });
    float* curve = curves.data() + tile * column_curve_length_;
    curve[0] = static_cast<float>(left);
    for (int record = 0; (record + 1) * kSlotsPerRecord <= MaxSlots(tile); ++record) {
      for (int slot = 0; slot < kSlotsPerRecord; ++slot) {
        const float score = *(begin + record * kSlotsPerRecord + slot);
        left =
            score < 0 ? std::numeric_limits<double>::infinity() : left - static_cast<double>(score);
      }
      if (!std::isfinite(left)) break;
      curve[record + 1] = static_cast<float>(left);
    }
  }
}

void MatrixQuantizer::MaskRow(int64_t row, std::span<const int32_t> records) {
  const std::vector<float> scores = Scores(row);
  std::vector<int64_t> order;
  for (int64_t tile = 0; tile < tiles_per_row_; ++tile) {
    order.resize(static_cast<size_t>(TileRows(tile)));
    std::iota(order.begin(), order.end(), tile * options_.tile_k);
    const int64_t slots =
        int64_t{records[static_cast<size_t>(row * tiles_per_row_ + tile)]} * kSlotsPerRecord;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    for (int64_t i = 0; i < static_cast<int64_t>(order.size()); ++i) {
      mask_[static_cast<size_t>(row * k_ + order[static_cast<size_t>(i)])] = i < slots ? 1 : 0;
    }
  }
}

void MatrixQuantizer::ScoreSearch() {
  std::vector<double> row_errors(static_cast<size_t>(n_));
  const auto fit_all = [&] {
    ForRows([&](int64_t row, GroupQuantizer& quantizer) {
      row_errors[static_cast<size_t>(row)] = FitRow(row, quantizer);
    });
    return std::accumulate(row_errors.begin(), row_errors.end(), 0.0);
  };
  double best_error = fit_all();  // without outliers
  error_without_ = best_error;
  if (budget_ == 0) return;

  column_curve_length_ = MaxSlots(0) / kSlotsPerRecord + 1;
  const int ramp = options_.rule == OutlierRule::kErrorWithRescale ? kRampRounds : 0;
  const int rounds = ramp > 0 ? ramp + kFullRounds : 1;
  std::vector<GroupParams> best_params;
  std::vector<uint8_t> best_mask;
  for (int round = 0; round < rounds; ++round) {
    column_curves_.assign(static_cast<size_t>(n_ * tiles_per_row_ * column_curve_length_),
                          std::numeric_limits<float>::infinity());
    ForRows([&](int64_t row, GroupQuantizer&) {
      const size_t width = static_cast<size_t>(tiles_per_row_ * column_curve_length_);
      ScoreRow(row,
               std::span<float>(column_curves_).subspan(static_cast<size_t>(row) * width, width));
    });
    const std::vector<int32_t> records =
        SelectRecords(column_curves_, column_curve_length_,
                      round < ramp ? budget_ * (round + 1) / (ramp + 1) : budget_);
    ForRows([&](int64_t row, GroupQuantizer&) { MaskRow(row, records); });
    const double error = fit_all();
    if (round < ramp) continue;
    if (round > ramp && error >= best_error) break;
    best_error = error;
    best_params = params_;
    best_mask = mask_;
  }
  params_ = std::move(best_params);
  mask_ = std::move(best_mask);
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
  QuantizedMatrix result = MakeQuantizedMatrix(state);
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
  return MatrixQuantizer(weights, n, k, options).Run();
}

}  // namespace flashquant
