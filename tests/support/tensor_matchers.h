// Comparing tensors: per element against a computed tolerance, and as a whole by normalised mean
// squared error. Both return a verdict with the worst element, so that a test can also show that a
// wrong result is refused.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gtest/gtest.h"

namespace flashquant {

// Unit roundoff of float.
inline constexpr double kFloatRoundoff = 0x1p-24;

// Fails unless |actual - expected| <= tolerance for every element; NaN fails.
testing::AssertionResult AllWithin(std::span<const float> actual, std::span<const double> expected,
                                   std::span<const double> tolerance);
testing::AssertionResult AllWithin(std::span<const float> actual, std::span<const double> expected,
                                   double tolerance);

// Fails unless sum (actual - expected)^2 <= limit * sum expected^2.
testing::AssertionResult NmseBelow(std::span<const float> actual, std::span<const double> expected,
                                   double limit);

// Fails unless all bits are equal (so NaN equals the same NaN, and 0 differs from -0).
testing::AssertionResult BitEqual(std::span<const float> actual, std::span<const float> expected);

// What float rounding may do to sums of `terms` products whose magnitudes add up to `magnitudes`:
// errors of independent roundings grow with the square root of their number. `unit_roundoff` is
// that of the activations.
std::vector<double> SumTolerance(std::span<const double> magnitudes, int64_t terms,
                                 double unit_roundoff = kFloatRoundoff);

}  // namespace flashquant
