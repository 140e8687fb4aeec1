#include "engine/quantize/sorted_group.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "engine/quantize/multiversion.h"
#include "kernels/base/math_util.h"

namespace flashquant {
namespace {

constexpr size_t kLanes = 16;
typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedVector __attribute__((vector_size(4 * kLanes), aligned(4)));
using group_search::kInsideLimit;
using group_search::kRoundMagic;

// Keys that sort as the floats do.
uint32_t SortableBits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

struct Levels {
  float scale = 0;
  float inverse = 0;
  float zero = 0;
  float limit = 0;
};

Levels LevelsOf(GroupParams params) {
  Levels levels;
  levels.scale = ToFloat(params.scale);
  levels.inverse = levels.scale == 0 ? 0.0f : 1.0f / levels.scale;
  levels.zero = static_cast<float>(params.zero);
  levels.limit = kInsideLimit * levels.scale * levels.scale;
  return levels;
}

float SquaredError(float value, const Levels& levels) {
  float level = value * levels.inverse + levels.zero;
  level = std::min(std::max(level, 0.0f), 15.0f);
  const float code = (level + kRoundMagic) - kRoundMagic;
  const float error = value - levels.scale * (code - levels.zero);
  return error * error;
}

// Errors of whole vectors; returns the sum of those inside.
FQ_MULTIVERSION float InsideErrors(const float* values, const float* importance, size_t count,
                                   const Levels& levels, float* errors) {
  const Vector low = Vector{} + 0.0f;
  const Vector high = Vector{} + 15.0f;
  Vector sum = {};
  for (size_t i = 0; i < count; i += kLanes) {
    const Vector value = *reinterpret_cast<const UnalignedVector*>(values + i);
    const Vector weight = *reinterpret_cast<const UnalignedVector*>(importance + i);
    Vector level = value * levels.inverse + levels.zero;
    level = level > low ? level : low;
    level = level < high ? level : high;
    const Vector code = (level + kRoundMagic) - kRoundMagic;
    const Vector error = value - levels.scale * (code - levels.zero);
    const Vector squared = error * error;
    const Vector weighted = squared * weight;
    const Vector inside = squared > levels.limit ? low : weighted;
    sum += inside;
    if (errors != nullptr) *reinterpret_cast<UnalignedVector*>(errors + i) = inside;
  }
  float total[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) total[lane] = sum[lane];
  for (size_t width = kLanes / 2; width > 0; width /= 2) {
    for (size_t lane = 0; lane < width; ++lane) total[lane] += total[lane + width];
  }
  return total[0];
}

}  // namespace

void SortedGroup::Load(std::span<const float> weights, std::span<const float> importance) {
  count_ = weights.size();
  weighted_ = !importance.empty();
  float total = 0;
  for (const float factor : importance) total += factor;
  const float share = static_cast<float>(count_) / std::max(total, 1e-3f);
  peak_ = importance.empty() ? group_search::kEvenPeak
                             : std::min(group_search::kEvenPeak * share, group_search::kMostPeak);
  keys_.resize(count_);
  for (size_t i = 0; i < count_; ++i) {
    keys_[i] = static_cast<uint64_t>(SortableBits(weights[i])) << 32 | i;
  }
  std::sort(keys_.begin(), keys_.end());
  const size_t padded = RoundUp(count_, kLanes);
  values_.assign(padded, 0.0f);
  importance_.assign(padded, 0.0f);
  for (size_t i = 0; i < count_; ++i) {
    const size_t index = keys_[i] & 0xffffffffu;
    values_[i] = weights[index];
    importance_[i] = importance.empty() ? 1.0f : importance[index];
  }
}

bool SortedGroup::Judge(GroupParams params, size_t most_outside) {
  params_ = params;
  const Levels levels = LevelsOf(params);
  // Where the last weight that may be outside on either side would be, decides most candidates.
  if (most_outside < count_) {
    size_t outside = 0;
    const float low = -levels.scale * (levels.zero + 0.5001f);
    const float high = levels.scale * (15.5001f - levels.zero);
    while (outside <= most_outside && values_[outside] < low) ++outside;
    const size_t below = outside;
    while (outside <= most_outside && values_[count_ - 1 - (outside - below)] > high) ++outside;
    if (outside > most_outside && !weighted_) return false;
  }
  inside_ = InsideErrors(values_.data(), importance_.data(), values_.size(), levels, nullptr);
  outside_.clear();
  from_above_.clear();
  const auto clipped = [&](size_t i, std::vector<float>* run) {
    const float squared = SquaredError(values_[i], levels);
    if (!(squared > levels.limit)) return false;
    const float error = squared * importance_[i];
    if (error > levels.limit) {
      run->push_back(error);
    } else {
      inside_ += error;
    }
    return true;
  };
  size_t first = 0;
  while (first < count_ && clipped(first, &outside_)) ++first;
  size_t last = count_;
  while (last > first && clipped(last - 1, &from_above_)) --last;
  if (from_above_.empty()) {
    if (weighted_) std::sort(outside_.begin(), outside_.end(), std::greater<>());
  } else {
    // Two falling runs, unless importance upsets them.
    merged_.resize(outside_.size() + from_above_.size());
    std::merge(outside_.begin(), outside_.end(), from_above_.begin(), from_above_.end(),
               merged_.begin(), std::greater<>());
    if (weighted_) std::sort(merged_.begin(), merged_.end(), std::greater<>());
    outside_.swap(merged_);
  }
  return outside_.size() <= most_outside;
}

float SortedGroup::ErrorWithout(size_t left_out) {
  if (left_out <= outside_.size()) {
    float sum = inside_;
    for (size_t i = outside_.size(); i > left_out; --i) sum += outside_[i - 1];
    return sum;
  }
  const Levels levels = LevelsOf(params_);
  errors_.resize(values_.size());
  InsideErrors(values_.data(), importance_.data(), values_.size(), levels, errors_.data());
  const size_t more = left_out - outside_.size();
  if (more >= count_ - outside_.size()) return 0;
  // Zeros stand in place of the clipped ones: close enough where few inside errors are left out.
  std::nth_element(errors_.begin(), errors_.begin() + static_cast<std::ptrdiff_t>(more),
                   errors_.end(), std::greater<>());
  float sum = inside_;
  for (size_t i = 0; i < more; ++i) sum -= errors_[i];
  return std::max(sum, 0.0f);
}

float SortedGroup::EstimateInside(size_t i) const {
  const float rank = static_cast<float>(i) / static_cast<float>(count_);
  const float mean = inside_ / static_cast<float>(count_);
  return rank >= 1 ? 0.0f : peak_ * mean * (1 - rank) * (1 - rank);
}

}  // namespace flashquant
