// The cheap half of the group search (int4_quantizer.h): judges one (scale, zero point) for every
// number of left-out weights at once, without sorting. What it picks is evaluated exactly later, so
// its errors of about 1% cost nothing but a slightly worse choice.
#pragma once

#include <span>
#include <vector>

#include "engine/quantize/int4_quantizer.h"

namespace flashquant {

// Bounds and sums of one candidate's squared errors. An error of a weight inside the code range is
// at most a quarter of the squared scale.
struct ErrorSums {
  float inside_limit = 0;
  float inside = 0;  // sum of the errors up to the limit
  float outside = 0;
  float largest = 0;
  int num_outside = 0;
};

ErrorSums SumErrors(std::span<const float> squared, float scale);

// False when no number of left-out weights can bring these errors below `errors`.
bool MayImprove(const ErrorSums& sums, std::span<const double> errors);

// The errors with 0, 1, ... left out, to about 1%: errors inside the code range are counted into
// bins instead of sorted. Updates `errors` and `params` where the candidate is better; returns
// whether it was anywhere.
// `outside` is scratch memory.
bool ApproximateCurve(std::span<const float> squared, const ErrorSums& sums, GroupParams candidate,
                      std::vector<float>* outside, std::span<double> errors,
                      std::span<GroupParams> params);

}  // namespace flashquant
