// How a quantization group turns codes into weights, and the constants of the search for a group's
// scale and zero point: engine/quantize/int4_quantizer.h searches on the CPU, and
// kernels/cuda/quantize on a GPU, over the same grid.
#pragma once

#include <cstdint>

#include "kernels/base/bfloat16.h"

namespace flashquant {

// dequant(code) = scale * (code - zero), code 0..15. The scale is the stored BF16 number, so what a
// search evaluates is what a checkpoint holds.
struct GroupParams {
  BFloat16 scale;
  uint8_t zero = 8;
  friend bool operator==(const GroupParams&, const GroupParams&) = default;
};

// Whether an outlier slot would hold a zero for this weight: such a weight gets none.
inline bool IsZeroInBFloat16(float weight) { return (ToBFloat16(weight).bits & 0x7fffu) == 0; }

// Weights above this are refused by callers: their squared errors would leave float's range.
inline constexpr float kMaxWeightMagnitude = 1e15f;
// A group whose weights are all below this is stored as zeros (scale 0).
inline constexpr float kTinyWeight = 0x1p-40f;

namespace group_search {

// Squares of smaller scales and their inverses would leave float's range.
inline constexpr float kMinScale = 0x1p-56f;
// Adding and subtracting 1.5 * 2^23 rounds a float below 2^22 to the nearest even integer.
inline constexpr float kRoundMagic = 12582912.0f;
// Of the curve's grid. Refining then looks at every BF16 scale in between: the error of a small
// group is a ragged function of the scale.
inline constexpr double kScaleStep = 1.06;
// The narrowest scale of the grid is at least this share of the widest. A grid of kScaleStep over
// that range has fewer than 100 scales.
inline constexpr double kLeastScaleShare = 0.01;
inline constexpr int kSweepSteps = 7;    // BF16 scales up and down: at least 2.7%
inline constexpr int kRefineRounds = 6;  // of least squares
// Zero points beyond the likely ones, until so many in a row help for no number of outliers.
inline constexpr int kPatience = 2;
// A candidate is looked at a little beyond where it seems best.
inline constexpr int kBeyond = 2;
// A little above the square of half a step, for rounding: a weight with a larger error is clipped.
inline constexpr float kInsideLimit = 0.2501f;
// Errors of even spread reach three times their mean; uneven importance puts the largest on top.
inline constexpr float kEvenPeak = 3;
inline constexpr float kMostPeak = 10;
// A scale somewhat above the range can fit a small group better.
inline constexpr float kAboveWidest = 1.06f;
inline constexpr float kAboveWidestSmall = 1.25f;  // up to kSmallGroup weights
inline constexpr int kSmallGroup = 64;
// At the low end, clipping is worth less when the extremes may be left out anyway.
inline constexpr double kBelowNarrow = 0.55;
inline constexpr double kBelowPerOutlier = 0.04;
inline constexpr int kBelowMaxOutliers = 8;

}  // namespace group_search
}  // namespace flashquant
