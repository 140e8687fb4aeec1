// The grid: scales from the full range down to about half of what remains without the
// extremes, 1.5% or 3% apart; zero points from the least to the largest of those that centre the
// mean, the median or the middle of the range, with and without extremes.
#include "engine/quantize/int4_quantizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

namespace flashquant {
namespace {

constexpr float kMinScale = 0x1p-100f;  // below it 1 / scale would overflow
constexpr int kMaxScales = 128;
// Adding and subtracting 1.5 * 2^23 rounds a float below 2^22 to the nearest even integer.
constexpr float kRoundMagic = 12582912.0f;

// Of the curve's grid. Refine then looks at every BF16 scale in between: the error of a small group
// is a ragged function of the scale.
constexpr double kScaleStep = 1.05;
constexpr int kSweepSteps = 7;  // BF16 scales up and down: at least 2.7%

bool IsZeroInBFloat16(float weight) { return (ToBFloat16(weight).bits & 0x7fffu) == 0; }

// The same arithmetic for one weight and for many, or codes would differ from what was evaluated.
inline float CodeOf(float weight, float inverse_scale, float zero) {
  const float level = std::min(std::max(weight * inverse_scale + zero, 0.0f), 15.0f);
  return (level + kRoundMagic) - kRoundMagic;
}

double SumOf(std::span<const float> values) {
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
  float mean = 0;
  float median = 0;
  int num_nonzero = 0;
};

GroupShape Measure(std::span<const float> weights, int max_outliers, std::vector<float>* sorted) {
  sorted->assign(weights.begin(), weights.end());
  std::sort(sorted->begin(), sorted->end());
  const size_t count = sorted->size();
  const size_t cut = std::min(static_cast<size_t>(max_outliers), (count - 1) / 2);
  GroupShape shape;
  shape.low = std::min(sorted->front(), 0.0f);
  shape.high = std::max(sorted->back(), 0.0f);
  shape.inner_low = std::min((*sorted)[cut], 0.0f);
  shape.inner_high = std::max((*sorted)[count - 1 - cut], 0.0f);
  shape.median = (*sorted)[count / 2];
  shape.mean = static_cast<float>(SumOf(*sorted) / static_cast<double>(count));
  for (float weight : *sorted) shape.num_nonzero += IsZeroInBFloat16(weight) ? 0 : 1;
  return shape;
}

// Bit z set: try zero point z.
uint32_t ZeroPointsToTry(const GroupShape& shape, float scale) {
  const float inverse = 1.0f / scale;
  // Outliers may be left out on one side only, hence the mixed middles.
  const float middle = 0.5f * (shape.low + shape.high);
  const float inner_middle = 0.5f * (shape.inner_low + shape.inner_high);
  const float left_middle = 0.5f * (shape.low + shape.inner_high);
  const float right_middle = 0.5f * (shape.inner_low + shape.high);
  float least = 15.0f;
  float most = 0.0f;
  for (const float centre :
       {shape.mean, shape.median, middle, inner_middle, left_middle, right_middle}) {
    const float exact = std::clamp(7.5f - centre * inverse, 0.0f, 15.0f);
    least = std::min(least, exact);
    most = std::max(most, exact);
  }
  uint32_t bits = 0;
  for (int zero = static_cast<int>(least); zero <= std::min(static_cast<int>(most) + 1, 15);
       ++zero) {
    bits |= 1u << zero;
  }
  return bits;
}

}  // namespace

uint8_t EncodeInt4(float weight, GroupParams params) {
  const float scale = ToFloat(params.scale);
  if (scale == 0) return params.zero;
  return static_cast<uint8_t>(CodeOf(weight, 1.0f / scale, static_cast<float>(params.zero)));
}

void SquaredErrors(std::span<const float> weights, GroupParams params, std::span<float> squared) {
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

namespace {

// False when no number of left-out weights can make these squared errors better than `errors`: an
// error inside the code range is at most a quarter of the squared scale, so the sum of the j
// largest is bounded without sorting. Only saves time; what it keeps is evaluated exactly.
bool MayImprove(std::span<const float> squared, float scale, std::span<const double> errors) {
  const float inside = 0.2501f * scale * scale;
  float total = 0;
  float total_outside = 0;
  float largest = 0;
  int num_outside = 0;
  for (const float error : squared) {
    total += error;
    total_outside += error > inside ? error : 0.0f;
    num_outside += error > inside ? 1 : 0;
    largest = std::max(largest, error);
  }
  for (size_t j = 0; j < errors.size(); ++j) {
    const int beyond = static_cast<int>(j) - num_outside;
    const float left_out = beyond >= 0 ? total_outside + static_cast<float>(beyond) * inside
                                       : static_cast<float>(j) * largest;
    // The slack covers the rounding of these float sums.
    if (static_cast<double>(total - left_out) - 1e-4 * static_cast<double>(total) < errors[j]) {
      return true;
    }
  }
  return false;
}

}  // namespace

void GroupQuantizer::TrySearchPoint(std::span<const float> weights, GroupParams candidate,
                                    std::span<double> errors, std::span<GroupParams> params) {
  const size_t count = weights.size();
  const size_t most = std::min(errors.size() - 1, count);
  SquaredErrors(weights, candidate, squared_);
  if (most == 0) {
    const double error = SumOf(squared_);
    if (error < errors[0]) {
      errors[0] = error;
      params[0] = candidate;
    }
    return;
  }
  if (!MayImprove(squared_, ToFloat(candidate.scale), errors)) return;
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

void GroupQuantizer::ErrorCurve(std::span<const float> weights, std::span<double> errors,
                                std::span<GroupParams> params) {
  std::fill(errors.begin(), errors.end(), std::numeric_limits<double>::infinity());
  std::fill(params.begin(), params.end(), GroupParams{});
  if (weights.empty()) {
    errors[0] = 0;
    return;
  }
  squared_.resize(weights.size());
  const int max_outliers = static_cast<int>(errors.size()) - 1;
  const GroupShape shape = Measure(weights, max_outliers, &sorted_);
  if (shape.num_nonzero == 0) {
    errors[0] = 0;  // scale 0: every code is the zero point
    return;
  }
  const float divisor = symmetric_ ? 7.0f : 15.0f;
  const float widest = symmetric_ ? std::max(-shape.low, shape.high) / divisor
                                  : shape.high / divisor - shape.low / divisor;
  const float narrow = symmetric_ ? std::max(-shape.inner_low, shape.inner_high) / 8.0f
                                  : shape.inner_high / divisor - shape.inner_low / divisor;
  // A scale somewhat above the range can fit a small group better.
  const double most = static_cast<double>(std::max(1.25f * widest, kMinScale));
  const double least =
      std::max({0.55 * static_cast<double>(narrow), most * 0.01, static_cast<double>(kMinScale)});
  const double ratio =
      std::max(kScaleStep, std::pow(most / std::min(least, most), 1.0 / kMaxScales));
  uint16_t previous = 0;
  for (double scale = most; scale >= least * 0.999; scale /= ratio) {
    GroupParams candidate;
    candidate.scale = ToBFloat16(static_cast<float>(scale));
    if (candidate.scale.bits == previous) continue;
    previous = candidate.scale.bits;
    const uint32_t zeros = symmetric_ ? 1u << 8 : ZeroPointsToTry(shape, ToFloat(candidate.scale));
    for (uint32_t left = zeros; left != 0; left &= left - 1) {
      candidate.zero = static_cast<uint8_t>(std::countr_zero(left));
      TrySearchPoint(weights, candidate, errors, params);
    }
  }
  for (size_t j = static_cast<size_t>(shape.num_nonzero) + 1; j < errors.size(); ++j) {
    errors[j] = std::numeric_limits<double>::infinity();
  }
}

double GroupQuantizer::Error(std::span<const float> weights, GroupParams params, int num_outliers) {
  squared_.resize(weights.size());
  SquaredErrors(weights, params, squared_);
  const size_t left_out = std::min(static_cast<size_t>(num_outliers), weights.size());
  if (left_out > 0 && left_out < weights.size()) {
    std::nth_element(squared_.begin(), squared_.begin() + static_cast<std::ptrdiff_t>(left_out),
                     squared_.end(), std::greater<>());
  }
  return SumOf(std::span<const float>(squared_).subspan(left_out));
}

double GroupQuantizer::Refine(std::span<const float> weights, int num_outliers,
                              GroupParams* params) {
  double best = Error(weights, *params, num_outliers);
  if (ToFloat(params->scale) == 0) return best;
  const GroupParams given = *params;
  for (int shift = -1; shift <= 1; ++shift) {
    const int zero = given.zero + shift;
    if (zero < 0 || zero > 15 || (symmetric_ && shift != 0)) continue;
    for (int step = -kSweepSteps; step <= kSweepSteps; ++step) {
      const GroupParams candidate{NextScale(given.scale, step), static_cast<uint8_t>(zero)};
      if (ToFloat(candidate.scale) < kMinScale) continue;
      const double error = Error(weights, candidate, num_outliers);
      if (error < best) {
        best = error;
        *params = candidate;
      }
    }
  }
  constexpr int kMaxRounds = 6;
  for (int round = 0; round < kMaxRounds; ++round) {
    const GroupParams start = *params;
    LargestErrors(weights, start, num_outliers, &order_);
    std::vector<float>& kept = sorted_;
    kept.assign(weights.begin(), weights.end());
    for (int32_t index : order_) kept[static_cast<size_t>(index)] = 0;
    for (int shift = -1; shift <= 1; ++shift) {
      const int zero = static_cast<int>(start.zero) + shift;
      if (zero < 0 || zero > 15 || (symmetric_ && shift != 0)) continue;
      // Least squares for the codes that this zero point gives at the present scale.
      double weight_level = 0;
      double level_level = 0;
      const GroupParams moved{start.scale, static_cast<uint8_t>(zero)};
      for (const float weight : kept) {
        const double level = static_cast<double>(EncodeInt4(weight, moved)) - zero;
        weight_level += static_cast<double>(weight) * level;
        level_level += level * level;
      }
      const BFloat16 fitted =
          level_level > 0 && weight_level > 0
              ? ToBFloat16(std::max(static_cast<float>(weight_level / level_level), kMinScale))
              : start.scale;
      for (const BFloat16 centre : {fitted, start.scale}) {
        for (int step = -1; step <= 1; ++step) {
          const GroupParams candidate{NextScale(centre, step), static_cast<uint8_t>(zero)};
          if (ToFloat(candidate.scale) < kMinScale) continue;
          const double error = Error(weights, candidate, num_outliers);
          if (error < best) {
            best = error;
            *params = candidate;
          }
        }
      }
    }
    if (*params == start) break;
  }
  return best;
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
  squared_.resize(weights.size());
  SquaredErrors(weights, params, squared_);
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
