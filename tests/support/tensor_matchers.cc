#include "tests/support/tensor_matchers.h"

#include <bit>
#include <cmath>

namespace flashquant {

testing::AssertionResult AllWithin(std::span<const float> actual, std::span<const double> expected,
                                   std::span<const double> tolerance) {
  if (actual.size() != expected.size() || actual.size() != tolerance.size()) {
    return testing::AssertionFailure() << actual.size() << " elements, expected " << expected.size()
                                       << ", tolerances " << tolerance.size();
  }
  size_t worst = 0;
  double worst_ratio = -1.0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::fabs(actual[i] - expected[i]);
    const double ratio = std::isnan(error) ? HUGE_VAL : error / (tolerance[i] + 1e-300);
    if (ratio > worst_ratio) {
      worst = i;
      worst_ratio = ratio;
    }
  }
  if (worst_ratio <= 1.0) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << "element " << worst << ": " << actual[worst] << ", expected " << expected[worst]
         << " within " << tolerance[worst];
}

testing::AssertionResult AllWithin(std::span<const float> actual, std::span<const double> expected,
                                   double tolerance) {
  const std::vector<double> tolerances(expected.size(), tolerance);
  return AllWithin(actual, expected, tolerances);
}

testing::AssertionResult NmseBelow(std::span<const float> actual, std::span<const double> expected,
                                   double limit) {
  double errors = 0.0;
  double squares = 0.0;
  for (size_t i = 0; i < actual.size() && i < expected.size(); ++i) {
    errors += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    squares += expected[i] * expected[i];
  }
  if (actual.size() == expected.size() && errors <= limit * squares) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << "normalised mean squared error " << errors / squares << ", limit " << limit;
}

testing::AssertionResult BitEqual(std::span<const float> actual, std::span<const float> expected) {
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure()
           << actual.size() << " elements, expected " << expected.size();
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::bit_cast<uint32_t>(actual[i]) != std::bit_cast<uint32_t>(expected[i])) {
      return testing::AssertionFailure()
             << "element " << i << ": " << actual[i] << ", expected exactly " << expected[i];
    }
  }
  return testing::AssertionSuccess();
}

std::vector<double> SumTolerance(std::span<const double> magnitudes, int64_t terms,
                                 double unit_roundoff) {
  const double factor = unit_roundoff * (2.0 + std::sqrt(static_cast<double>(terms)));
  std::vector<double> tolerance;
  for (const double magnitude : magnitudes) tolerance.push_back(magnitude * factor + 1e-30);
  return tolerance;
}

}  // namespace flashquant
