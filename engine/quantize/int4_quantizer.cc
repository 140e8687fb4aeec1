// The grid: scales 6% apart from the full range down to what remains without the extremes; zero
// points outwards from the one that centres the range, with and without extremes.
#include "engine/quantize/int4_quantizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "engine/quantize/multiversion.h"
#include "engine/quantize/sorted_group.h"

namespace flashquant {
namespace {

using namespace group_search;

// The same arithmetic for one weight and for many, or codes would differ from what was evaluated.
inline float CodeOf(float weight, float inverse_scale, float zero) {
  const float level = std::min(std::max(weight * inverse_scale + zero, 0.0f), 15.0f);
  return (level + kRoundMagic) - kRoundMagic;
}

FQ_MULTIVERSION double SumOf(std::span<const float> values) {
  // Four lanes with a fixed order: repeatable, and free of one long dependency chain.
  double lanes[4] = {0, 0, 0, 0};
  size_t i = 0;
  for (; i + 4 <= values.size(); i += 4) {
    for (size_t lane = 0; lane < 4; ++lane) lanes[lane] += static_cast<double>(values[i + lane]);
  }
  for (; i < values.size(); ++i) lanes[0] += static_cast<double>(values[i]);
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

BFloat16 NextScale(BFloat16 scale, int steps) {
  const int bits = std::clamp(static_cast<int>(scale.bits) + steps, 1, 0x7f7f);
  return {static_cast<uint16_t>(bits)};
}

// What the grid is built from.
struct GroupShape {
  float low = 0;        // least weight, at most 0
  float high = 0;       // largest weight, at least 0
  float inner_low = 0;  // the same without the extremes that may be left out
  float inner_high = 0;
  int num_nonzero = 0;
};

GroupShape ShapeOf(const SortedGroup& group, int max_outliers) {
  const size_t count = group.size();
  const size_t cut = std::min(static_cast<size_t>(max_outliers), (count - 1) / 2);
  GroupShape shape;
  shape.low = std::min(group.value(0), 0.0f);
  shape.high = std::max(group.value(count - 1), 0.0f);
  shape.inner_low = std::min(group.value(cut), 0.0f);
  shape.inner_high = std::max(group.value(count - 1 - cut), 0.0f);
  for (size_t i = 0; i < count; ++i) shape.num_nonzero += IsZeroInBFloat16(group.value(i)) ? 0 : 1;
  return shape;
}

// The zero point that puts `centre` in the middle of the code range, as near as it goes.
int ZeroFor(float centre, float scale) {
  return static_cast<int>(std::clamp(7.5f - centre / scale, 0.0f, 15.0f) + 0.5f);
}

}  // namespace

uint8_t EncodeInt4(float weight, GroupParams params) {
  const float scale = ToFloat(params.scale);
  if (scale == 0) return params.zero;
  return static_cast<uint8_t>(CodeOf(weight, 1.0f / scale, static_cast<float>(params.zero)));
}

FQ_MULTIVERSION void SquaredErrors(std::span<const float> weights, GroupParams params,
                                   std::span<float> squared) {
  const float scale = ToFloat(params.scale);
  const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
  const float zero = static_cast<float>(params.zero);
  const float* in = weights.data();
  float* out = squared.data();
  for (size_t i = 0; i < weights.size(); ++i) {
    const float error = in[i] - scale * (CodeOf(in[i], inverse, zero) - zero);
    out[i] = error * error;
  }
}

GroupQuantizer::GroupQuantizer(bool symmetric)
    : symmetric_(symmetric), sorted_(std::make_unique<SortedGroup>()) {}
GroupQuantizer::~GroupQuantizer() = default;

void GroupQuantizer::Measure(std::span<const float> weights, GroupParams params) {
  squared_.resize(weights.size());
  SquaredErrors(weights, params, squared_);
  for (size_t i = 0; i < importance_.size(); ++i) squared_[i] *= importance_[i];
}

void GroupQuantizer::AddExactCurve(std::span<const float> weights, GroupParams candidate,
                                   size_t last, std::span<double> errors,
                                   std::span<GroupParams> params) {
  const size_t count = weights.size();
  const size_t most = std::min(last, count);
  Measure(weights, candidate);
  if (most < count) {
    std::nth_element(squared_.begin(), squared_.begin() + static_cast<std::ptrdiff_t>(most),
                     squared_.end(), std::greater<>());
  }
  std::sort(squared_.begin(), squared_.begin() + static_cast<std::ptrdiff_t>(most),
            std::greater<>());
  // From the small errors up: a difference of large sums would lose the small ones.
  double error = SumOf(std::span<const float>(squared_).subspan(most));
  for (size_t j = most;; --j) {
    if (error < errors[j]) {
      errors[j] = error;
      params[j] = candidate;
    }
    if (j == 0) break;
    error += static_cast<double>(squared_[j - 1]);
  }
}

bool GroupQuantizer::TryCandidate(GroupParams candidate) {
  // With many more clipped than may be left out, a wider scale is better.
  if (!sorted_->Judge(candidate, approximate_.size() + sorted_->size() / 8)) return false;
  const std::span<const float> outside = sorted_->outside();
  bool improved = false;
  const auto offer = [&](size_t left_out, float error) {
    if (!(error < approximate_[left_out])) return;
    approximate_[left_out] = error;
    candidates_[left_out] = candidate;
    improved = true;
  };
  float error = sorted_->inside();
  for (size_t j = outside.size();; --j) {
    if (j < approximate_.size()) offer(j, error);
    if (j == 0) break;
    error += outside[j - 1];
  }
  error = sorted_->inside();
  for (size_t j = outside.size() + 1; j < approximate_.size(); ++j) {
    error = std::max(error - sorted_->EstimateInside(j - 1 - outside.size()), 0.0f);
    offer(j, error);
  }
  return improved;
}

void GroupQuantizer::SearchZeroPoints(GroupParams candidate, float inner_ends, float ends) {
  if (symmetric_) {
    candidate.zero = 8;
    TryCandidate(candidate);
    return;
  }
  // Between the two middles and beyond them.
  const float scale = ToFloat(candidate.scale);
  const int inner = ZeroFor(0.5f * inner_ends, scale);
  const int outer = ZeroFor(0.5f * ends, scale);
  const int first = std::min(inner, outer);
  const int last = std::max(inner, outer);
  for (int zero = first; zero <= last; ++zero) {
    candidate.zero = static_cast<uint8_t>(zero);
    TryCandidate(candidate);
  }
  for (const int direction : {1, -1}) {
    int useless = 0;
    for (int zero = direction > 0 ? last + 1 : first - 1;
         zero >= 0 && zero <= 15 && useless < kPatience; zero += direction) {
      candidate.zero = static_cast<uint8_t>(zero);
      useless = TryCandidate(candidate) ? 0 : useless + 1;
    }
  }
}

void GroupQuantizer::ErrorCurve(std::span<const float> weights, std::span<double> errors,
                                std::span<GroupParams> params) {
  std::fill(errors.begin(), errors.end(), std::numeric_limits<double>::infinity());
  std::fill(params.begin(), params.end(), GroupParams{});
  if (weights.empty()) {
    errors[0] = 0;
    return;
  }
  sorted_->Load(weights, importance_);
  const int max_outliers = static_cast<int>(errors.size()) - 1;
  const GroupShape shape = ShapeOf(*sorted_, max_outliers);
  if (shape.num_nonzero == 0 || std::max(-shape.low, shape.high) < kTinyWeight) {
    errors[0] = Error(weights, params[0], 0);  // scale 0: every code is the zero point
    return;
  }
  const float divisor = symmetric_ ? 7.0f : 15.0f;
  const float widest = symmetric_ ? std::max(-shape.low, shape.high) / divisor
                                  : shape.high / divisor - shape.low / divisor;
  const float narrow = symmetric_ ? std::max(-shape.inner_low, shape.inner_high) / 8.0f
                                  : shape.inner_high / divisor - shape.inner_low / divisor;
  const float above = weights.size() > kSmallGroup ? kAboveWidest : kAboveWidestSmall;
  const double below = kBelowNarrow + kBelowPerOutlier * std::min(max_outliers, kBelowMaxOutliers);
  const double most = static_cast<double>(std::max(above * widest, kMinScale));
  const double least = std::max({below * static_cast<double>(narrow), most * kLeastScaleShare,
                                 static_cast<double>(kMinScale)});
  approximate_.assign(errors.size(), std::numeric_limits<float>::infinity());
  candidates_.assign(errors.size(), GroupParams{});
  uint16_t previous = 0;
  for (double scale = most; scale >= least * 0.999; scale /= kScaleStep) {
    GroupParams candidate;
    candidate.scale = ToBFloat16(static_cast<float>(scale));
    if (candidate.scale.bits == previous) continue;
    previous = candidate.scale.bits;
    SearchZeroPoints(candidate, shape.inner_low + shape.inner_high, shape.low + shape.high);
  }
  // What is reported is exact.
  for (size_t j = 0; j < candidates_.size();) {
    size_t end = j + 1;
    while (end < candidates_.size() && candidates_[end] == candidates_[j]) ++end;
    if (std::isfinite(approximate_[j])) {
      AddExactCurve(weights, candidates_[j],
                    std::min(end + static_cast<size_t>(kBeyond), errors.size()) - 1, errors,
                    params);
    }
    j = end;
  }
  // Leaving out one more never costs anything.
  for (size_t j = 1; j < errors.size(); ++j) {
    if (errors[j] > errors[j - 1]) AddExactCurve(weights, params[j - 1], j, errors, params);
  }
  for (size_t j = static_cast<size_t>(shape.num_nonzero) + 1; j < errors.size(); ++j) {
    errors[j] = std::numeric_limits<double>::infinity();
  }
}

double GroupQuantizer::Error(std::span<const float> weights, GroupParams params, int num_outliers) {
  Measure(weights, params);
  const size_t left_out = std::min(static_cast<size_t>(num_outliers), weights.size());
  if (left_out > 0 && left_out < weights.size()) {
    std::nth_element(squared_.begin(), squared_.begin() + static_cast<std::ptrdiff_t>(left_out),
                     squared_.end(), std::greater<>());
  }
  return SumOf(std::span<const float>(squared_).subspan(left_out));
}

void GroupQuantizer::Compare(GroupParams candidate, int num_outliers, float* best,
                             GroupParams* params) {
  if (ToFloat(candidate.scale) < kMinScale) return;
  if (!sorted_->Judge(candidate, sorted_->size())) return;
  const float error = sorted_->ErrorWithout(static_cast<size_t>(num_outliers));
  if (!(error < *best)) return;
  *best = error;
  *params = candidate;
}

// Least squares for the codes that this and the neighbouring zero points give at the present scale.
void GroupQuantizer::FitScales(std::span<const float> weights, int num_outliers, float* best,
                               GroupParams* params) {
  const GroupParams start = *params;
  LargestErrors(weights, start, num_outliers, &order_);
  kept_.assign(weights.begin(), weights.end());
  for (int32_t index : order_) kept_[static_cast<size_t>(index)] = 0;
  const float inverse = 1.0f / ToFloat(start.scale);
  for (int shift = -1; shift <= 1; ++shift) {
    const int zero = static_cast<int>(start.zero) + shift;
    if (zero < 0 || zero > 15 || (symmetric_ && shift != 0)) continue;
    double weight_level = 0;
    double level_level = 0;
    const float shifted = static_cast<float>(zero);
    for (size_t i = 0; i < kept_.size(); ++i) {
      const double level = static_cast<double>(CodeOf(kept_[i], inverse, shifted) - shifted);
      const double importance = importance_.empty() ? 1.0 : static_cast<double>(importance_[i]);
      weight_level += importance * static_cast<double>(kept_[i]) * level;
      level_level += importance * level * level;
    }
    if (!(level_level > 0 && weight_level > 0)) continue;
    const BFloat16 fitted =
        ToBFloat16(std::max(static_cast<float>(weight_level / level_level), kMinScale));
    for (int step = -1; step <= 1; ++step) {
      Compare({NextScale(fitted, step), static_cast<uint8_t>(zero)}, num_outliers, best, params);
    }
  }
}

double GroupQuantizer::Refine(std::span<const float> weights, int num_outliers,
                              GroupParams* params) {
  const double before = Error(weights, *params, num_outliers);
  if (ToFloat(params->scale) == 0 || weights.empty()) return before;
  const GroupParams given = *params;
  sorted_->Load(weights, importance_);
  sorted_->Judge(given, sorted_->size());
  float best = sorted_->ErrorWithout(static_cast<size_t>(num_outliers));
  for (int shift = -1; shift <= 1; ++shift) {
    const int zero = given.zero + shift;
    if (zero < 0 || zero > 15 || (symmetric_ && shift != 0)) continue;
    for (int step = -kSweepSteps; step <= kSweepSteps; ++step) {
      Compare({NextScale(given.scale, step), static_cast<uint8_t>(zero)}, num_outliers, &best,
              params);
    }
  }
  for (int round = 0; round < kRefineRounds; ++round) {
    const GroupParams start = *params;
    FitScales(weights, num_outliers, &best, params);
    if (*params == start) break;
  }
  const double after = Error(weights, *params, num_outliers);
  if (after <= before) return after;
  *params = given;  // the sums in float were not exact enough
  return before;
}

GroupParams GroupQuantizer::Fit(std::span<const float> weights) {
  double error = 0;
  GroupParams params;
  ErrorCurve(weights, std::span<double>(&error, 1), std::span<GroupParams>(&params, 1));
  Refine(weights, 0, &params);
  return params;
}

void GroupQuantizer::LargestErrors(std::span<const float> weights, GroupParams params, int count,
                                   std::vector<int32_t>* indices) {
  Measure(weights, params);
  indices->resize(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) (*indices)[i] = static_cast<int32_t>(i);
  const size_t wanted = std::min(static_cast<size_t>(count), weights.size());
  const auto before = [&](int32_t a, int32_t b) {
    const size_t ia = static_cast<size_t>(a);
    const size_t ib = static_cast<size_t>(b);
    const bool zero_a = IsZeroInBFloat16(weights[ia]);
    const bool zero_b = IsZeroInBFloat16(weights[ib]);
    if (zero_a != zero_b) return zero_b;
    if (squared_[ia] != squared_[ib]) return squared_[ia] > squared_[ib];
    const float magnitude_a = std::fabs(weights[ia]);
    const float magnitude_b = std::fabs(weights[ib]);
    if (magnitude_a != magnitude_b) return magnitude_a > magnitude_b;
    return a < b;
  };
  std::partial_sort(indices->begin(), indices->begin() + static_cast<std::ptrdiff_t>(wanted),
                    indices->end(), before);
  indices->resize(wanted);
}

}  // namespace flashquant
