// What the stand-alone tests of linear kernels share: counted checks, and an output held against
// its reference in FP64. One program has one count. No device code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/bench/linear_problem.h"

namespace flashquant::gpu_test {

inline constexpr double kTolerance = 2.5e-3;  // BF16 output rounding alone is about 1.7e-3
inline constexpr int kGuard = 8;              // columns and rows of y that nobody may write
inline constexpr uint16_t kPoison = 0x7fc1;   // a NaN

inline int num_checks = 0;
inline int num_failures = 0;
inline double worst_error = 0.0;  // relative, of all outputs compared

inline void Check(bool ok, const std::string& what) {
  ++num_checks;
  if (ok) return;
  ++num_failures;
  if (num_failures <= 40) std::printf("FAILED: %s\n", what.c_str());
}

// y: BF16 rows of y_stride values, of which the first m, and n values in each, were to be written
// over poison. reference: [at least m, n].
inline void CompareWithReference(const std::vector<uint16_t>& y, int y_stride,
                                 const std::vector<double>& reference, int m, int n,
                                 const std::string& name) {
  double error = 0.0;
  double norm = 0.0;
  bool guards = true;
  for (size_t i = 0; i < y.size(); ++i) {
    const auto row = static_cast<int>(i / static_cast<size_t>(y_stride));
    const auto column = static_cast<int>(i % static_cast<size_t>(y_stride));
    if (row >= m || column >= n) {
      guards = guards && y[i] == kPoison;
      continue;
    }
    const double want =
        reference[static_cast<size_t>(row) * static_cast<size_t>(n) + static_cast<size_t>(column)];
    const double difference = bench::FromBf16(y[i]) - want;
    error += difference * difference;
    norm += want * want;
  }
  const double relative = std::sqrt(error / norm);
  worst_error = std::max(worst_error, relative);
  Check(relative <= kTolerance, name + ": relative error " + std::to_string(relative));
  Check(guards, name + ": wrote outside y");
}

}  // namespace flashquant::gpu_test
