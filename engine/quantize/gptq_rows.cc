#include "engine/quantize/gptq_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/quantize/matrix_multiply.h"
#include "engine/quantize/multiversion.h"

namespace flashquant {
namespace {

constexpr int64_t kRows = GptqRows::kRows;
using group_search::kRoundMagic;

// sum[row] += sum over i of factors[i] * columns[i][row].
FQ_MULTIVERSION void AddScaledColumns(int64_t count, const float* factors, const float* columns,
                                      float* sum) {
  float total[kRows];
  std::copy_n(sum, kRows, total);
  for (int64_t i = 0; i < count; ++i) {
    const float factor = factors[i];
    for (int64_t row = 0; row < kRows; ++row) total[row] += factor * columns[i * kRows + row];
  }
  std::copy_n(total, kRows, sum);
}

// The 16 levels' nearest to each value, the code and what it stands for.
FQ_MULTIVERSION void RoundColumn(const float* values, const float* scale, const float* inverse,
                                 const float* zero, float* rounded, uint8_t* codes) {
  for (int64_t row = 0; row < kRows; ++row) {
    // Written so that a value that is not a number gets a code all the same.
    float level = values[row] * inverse[row] + zero[row];
    level = level > 0.0f ? level : 0.0f;
    level = level < 15.0f ? level : 15.0f;
    const float code = (level + kRoundMagic) - kRoundMagic;
    rounded[row] = scale[row] * (code - zero[row]);
    codes[row] = static_cast<uint8_t>(static_cast<int32_t>(code));
  }
}

// Bounded, so that compensation that ran away cannot put an infinity into the file.
void UseOutliers(const float* values, const uint8_t* mask, float* rounded) {
  for (int64_t row = 0; row < kRows; ++row) {
    if (mask[row] == 0) continue;
    const float value = std::isnan(values[row]) ? 0.0f : values[row];
    rounded[row] =
        ToFloat(ToBFloat16(std::clamp(value, -kMaxWeightMagnitude, kMaxWeightMagnitude)));
  }
}

}  // namespace

GptqRows::GptqRows(std::span<const float> weights, const HessianFactor& factor,
                   const GroupPlan& plan, int64_t first_row, MatrixState* state)
    : factor_(factor),
      plan_(plan),
      k_(factor.k),
      group_size_(state->group_size),
      groups_per_row_(state->groups_per_row()),
      first_row_(first_row),
      num_rows_(std::min(kRows, state->n - first_row)),
      state_(state),
      quantizer_(state->symmetric),
      weights_(static_cast<size_t>(k_ * kRows), 0.0f),
      errors_(weights_.size(), 0.0f),
      mask_(weights_.size(), 0),
      codes_(weights_.size(), 0),
      change_(static_cast<size_t>(group_size_ * kRows)) {
  for (int64_t place = 0; place < k_; ++place) {
    const int64_t column = factor_.column_at[static_cast<size_t>(place)];
    for (int64_t row = 0; row < num_rows_; ++row) {
      weights_[static_cast<size_t>(place * kRows + row)] =
          weights[static_cast<size_t>((first_row_ + row) * k_ + column)];
    }
  }
}

int64_t GptqRows::GroupBegin(int64_t end) const {
  const int64_t group = GroupAt(end - 1);
  return end - std::min(group_size_, k_ - group * group_size_);
}

void GptqRows::LoadRounding(int64_t group, Rounding* rounding) {
  for (int64_t row = 0; row < kRows; ++row) {
    const GroupParams params = row < num_rows_ ? Params(row, group) : GroupParams{};
    rounding->scale[row] = ToFloat(params.scale);
    rounding->inverse[row] = rounding->scale[row] == 0 ? 0.0f : 1.0f / rounding->scale[row];
    rounding->zero[row] = static_cast<float>(params.zero);
  }
}

void GptqRows::UsePlannedMask(int64_t begin, int64_t end) {
  for (int64_t place = begin; place < end; ++place) {
    const int64_t column = factor_.column_at[static_cast<size_t>(place)];
    for (int64_t row = 0; row < num_rows_; ++row) {
      mask_[static_cast<size_t>(place * kRows + row)] =
          plan_.mask[static_cast<size_t>((first_row_ + row) * k_ + column)];
    }
  }
}

// values: [place - begin][kRows].
void GptqRows::FitGroup(int64_t begin, int64_t end, std::span<const float> values) {
  const int64_t group = GroupAt(begin);
  const int64_t first_column = group * group_size_;
  const size_t count = static_cast<size_t>(end - begin);
  quantizer_.SetImportance(
      std::span<const float>(factor_.importance).subspan(static_cast<size_t>(first_column), count));
  std::vector<float> in_order(count);
  std::vector<int64_t> place_of(count);
  for (int64_t place = begin; place < end; ++place) {
    place_of[static_cast<size_t>(factor_.column_at[static_cast<size_t>(place)] - first_column)] =
        place;
  }
  std::vector<int32_t> chosen;
  for (int64_t row = 0; row < num_rows_; ++row) {
    for (size_t i = 0; i < count; ++i) {
      const float value = values[static_cast<size_t>((place_of[i] - begin) * kRows + row)];
      in_order[i] = std::fabs(value) <= kMaxWeightMagnitude ? value : 0.0f;
    }
    const int32_t outliers =
        plan_.outliers[static_cast<size_t>((first_row_ + row) * groups_per_row_ + group)];
    GroupParams& params = Params(row, group);
    quantizer_.Refine(in_order, outliers, &params);
    quantizer_.LargestErrors(in_order, params, outliers, &chosen);
    for (const int32_t index : chosen) {
      mask_[static_cast<size_t>(place_of[static_cast<size_t>(index)] * kRows + row)] = 1;
    }
  }
}

void GptqRows::Quantize() {
  std::vector<float> block;
  Rounding rounding;
  alignas(64) float rounded[kRows];
  for (int64_t end = k_; end > 0;) {
    const int64_t begin = GroupBegin(end);
    block.assign(weights_.begin() + begin * kRows, weights_.begin() + end * kRows);
    MultiplyAdd(end - begin, kRows, k_ - end, 1.0f,
                {factor_.propagation.data() + begin * k_ + end, k_, 1},
                errors_.data() + end * kRows, kRows, block.data(), kRows);
    if (plan_.mask.empty()) {
      FitGroup(begin, end, block);
    } else {
      UsePlannedMask(begin, end);
    }
    LoadRounding(GroupAt(begin), &rounding);
    for (int64_t place = end - 1; place >= begin; --place) {
      float* values = block.data() + (place - begin) * kRows;
      AddScaledColumns(end - place - 1, factor_.propagation.data() + place * k_ + place + 1,
                       errors_.data() + (place + 1) * kRows, values);
      RoundColumn(values, rounding.scale, rounding.inverse, rounding.zero, rounded,
                  codes_.data() + place * kRows);
      UseOutliers(values, mask_.data() + place * kRows, rounded);
      for (int64_t row = 0; row < kRows; ++row) {
        const size_t at = static_cast<size_t>(place * kRows + row);
        errors_[at] = weights_[at] - rounded[row];
      }
    }
    end = begin;
  }
}

void GptqRows::Load() {
  has_gradient_ = false;
  for (int64_t place = 0; place < k_; ++place) {
    const int64_t column = factor_.column_at[static_cast<size_t>(place)];
    for (int64_t row = 0; row < num_rows_; ++row) {
      const size_t at = static_cast<size_t>(place * kRows + row);
      const size_t from = static_cast<size_t>((first_row_ + row) * k_ + column);
      const GroupParams& params = Params(row, column / group_size_);
      codes_[at] = state_->codes[from];
      mask_[at] = state_->mask[from];
      const float value =
          mask_[at] != 0 ? ToFloat(ToBFloat16(state_->values[from]))
                         : ToFloat(params.scale) * static_cast<float>(codes_[at] - params.zero);
      errors_[at] = weights_[at] - value;
    }
  }
}

void GptqRows::OutlierGains(std::span<float> gains) {
  ComputeGradient();
  Rounding rounding;
  alignas(64) float wanted[kRows];
  alignas(64) float rounded[kRows];
  uint8_t codes[kRows];
  for (int64_t end = k_; end > 0;) {
    const int64_t begin = GroupBegin(end);
    LoadRounding(GroupAt(begin), &rounding);
    for (int64_t place = begin; place < end; ++place) {
      const int64_t column = factor_.column_at[static_cast<size_t>(place)];
      const float diagonal = factor_.hessian[static_cast<size_t>(place * k_ + place)];
      for (int64_t row = 0; row < kRows; ++row) {
        const size_t at = static_cast<size_t>(place * kRows + row);
        wanted[row] = (weights_[at] - errors_[at]) + gradient_[at] / diagonal;
      }
      RoundColumn(wanted, rounding.scale, rounding.inverse, rounding.zero, rounded, codes);
      for (int64_t row = 0; row < num_rows_; ++row) {
        const float off = wanted[row] - rounded[row];
        const float gain = std::min(off * off * diagonal, std::numeric_limits<float>::max());
        const bool is_zero = (ToBFloat16(wanted[row]).bits & 0x7fffu) == 0;
        gains[static_cast<size_t>((first_row_ + row) * k_ + column)] =
            is_zero || std::isnan(gain) ? -1.0f : gain;
      }
    }
    end = begin;
  }
}

void GptqRows::ComputeGradient() {
  gradient_.assign(errors_.size(), 0.0f);
  MultiplyAdd(k_, kRows, k_, 1.0f, {factor_.hessian.data(), k_, 1}, errors_.data(), kRows,
              gradient_.data(), kRows);
  has_gradient_ = true;
}

// With codes fixed, the squared output error is a parabola of a group's scale.
void GptqRows::RefitScales(int64_t begin, int64_t end) {
  const int64_t group = GroupAt(begin);
  const int64_t count = end - begin;
  std::vector<float> levels(static_cast<size_t>(count * kRows), 0.0f);
  for (int64_t i = 0; i < count * kRows; ++i) {
    const int64_t row = i % kRows;
    const size_t at = static_cast<size_t>(begin * kRows + i);
    if (row >= num_rows_ || mask_[at] != 0) continue;
    levels[static_cast<size_t>(i)] =
        static_cast<float>(codes_[at]) - static_cast<float>(Params(row, group).zero);
  }
  std::vector<float> product(levels.size(), 0.0f);
  MultiplyAdd(count, kRows, count, 1.0f, {factor_.hessian.data() + begin * k_ + begin, k_, 1},
              levels.data(), kRows, product.data(), kRows);
  for (int64_t row = 0; row < num_rows_; ++row) {
    double slope = 0;
    double curvature = 0;
    for (int64_t i = 0; i < count; ++i) {
      const size_t at = static_cast<size_t>(i * kRows + row);
      slope += static_cast<double>(levels[at]) *
               static_cast<double>(gradient_[static_cast<size_t>(begin * kRows) + at]);
      curvature += static_cast<double>(levels[at]) * static_cast<double>(product[at]);
    }
    GroupParams& params = Params(row, group);
    if (!(curvature > 0)) continue;
    const float scale = ToFloat(params.scale);
    const BFloat16 fitted =
        ToBFloat16(static_cast<float>(static_cast<double>(scale) + slope / curvature));
    const float step = ToFloat(fitted) - scale;
    // Rounded to BF16 it must still be a gain.
    const double gain =
        static_cast<double>(step) * (2 * slope - static_cast<double>(step) * curvature);
    if (!(ToFloat(fitted) > 0) || !std::isfinite(ToFloat(fitted)) || !(gain > 0)) continue;
    params.scale = fitted;
    for (int64_t i = 0; i < count; ++i) {
      const size_t at = static_cast<size_t>(i * kRows + row);
      change_[at] = -step * levels[at];
    }
  }
}

void GptqRows::Descend() {
  if (!has_gradient_) ComputeGradient();
  Rounding rounding;
  std::vector<float> block;
  std::vector<float> inner;
  alignas(64) float wanted[kRows];
  alignas(64) float rounded[kRows];
  for (int64_t end = k_; end > 0;) {
    const int64_t begin = GroupBegin(end);
    const int64_t count = end - begin;
    const float* diagonal_block = factor_.hessian.data() + begin * k_ + begin;
    std::fill(change_.begin(), change_.end(), 0.0f);
    RefitScales(begin, end);
    LoadRounding(GroupAt(begin), &rounding);
    block.assign(gradient_.begin() + begin * kRows, gradient_.begin() + end * kRows);
    MultiplyAdd(count, kRows, count, 1.0f, {diagonal_block, k_, 1}, change_.data(), kRows,
                block.data(), kRows);
    for (int64_t i = 0; i < count * kRows; ++i) {
      errors_[static_cast<size_t>(begin * kRows + i)] += change_[static_cast<size_t>(i)];
    }
    inner.assign(static_cast<size_t>(count * kRows), 0.0f);  // changes of this loop alone
    for (int64_t i = count - 1; i >= 0; --i) {
      const size_t first = static_cast<size_t>((begin + i) * kRows);
      float* slope = block.data() + i * kRows;
      AddScaledColumns(count - i - 1, diagonal_block + i * k_ + i + 1,
                       inner.data() + (i + 1) * kRows, slope);
      const float inverse = 1.0f / diagonal_block[i * k_ + i];
      for (int64_t row = 0; row < kRows; ++row) {
        const size_t at = first + static_cast<size_t>(row);
        wanted[row] = (weights_[at] - errors_[at]) + slope[row] * inverse;
      }
      RoundColumn(wanted, rounding.scale, rounding.inverse, rounding.zero, rounded,
                  codes_.data() + first);
      UseOutliers(wanted, mask_.data() + first, rounded);
      for (int64_t row = 0; row < kRows; ++row) {
        const size_t at = first + static_cast<size_t>(row);
        const size_t here = static_cast<size_t>(i * kRows + row);
        const float error = weights_[at] - rounded[row];
        inner[here] = error - errors_[at];
        change_[here] += inner[here];
        errors_[at] = error;
      }
    }
    MultiplyAdd(k_, kRows, count, 1.0f, {factor_.hessian.data() + begin, k_, 1}, change_.data(),
                kRows, gradient_.data(), kRows);
    end = begin;
  }
}

GptqSums GptqRows::Finish() {
  ComputeGradient();
  std::vector<float> moved(weights_.size(), 0.0f);  // damped Hessian times weights
  MultiplyAdd(k_, kRows, k_, 1.0f, {factor_.hessian.data(), k_, 1}, weights_.data(), kRows,
              moved.data(), kRows);
  GptqSums sums;
  for (int64_t place = 0; place < k_; ++place) {
    const int64_t column = factor_.column_at[static_cast<size_t>(place)];
    for (int64_t row = 0; row < num_rows_; ++row) {
      const size_t at = static_cast<size_t>(place * kRows + row);
      const double weight = static_cast<double>(weights_[at]);
      const double error = static_cast<double>(errors_[at]);
      sums.energy += weight * weight;
      sums.error += error * error;
      sums.output_energy += weight * (static_cast<double>(moved[at]) - factor_.damping * weight);
      sums.output_error += error * (static_cast<double>(gradient_[at]) - factor_.damping * error);
      const size_t to = static_cast<size_t>((first_row_ + row) * k_ + column);
      state_->mask[to] = mask_[at];
      state_->codes[to] = codes_[at];
      state_->values[to] = weights_[at] - errors_[at];
    }
  }
  return sums;
}

}  // namespace flashquant
