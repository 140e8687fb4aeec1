// Sums run in independent lanes with a fixed order: vectorized by the compiler, the same
// everywhere.
#include "engine/quantize/approximate_curve.h"

#include <algorithm>
#include <cstddef>

#include "engine/quantize/multiversion.h"

namespace flashquant {

FQ_MULTIVERSION ErrorSums SumErrors(std::span<const float> squared, float scale) {
  ErrorSums sums;
  sums.inside_limit = 0.2501f * scale * scale;
  constexpr size_t kLanes = 8;  // independent sums, for vectorization
  float inside[kLanes] = {};
  float outside[kLanes] = {};
  float largest[kLanes] = {};
  int num_outside[kLanes] = {};
  const float* values = squared.data();
  size_t i = 0;
  for (; i + kLanes <= squared.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float error = values[i + lane];
      const bool beyond = error > sums.inside_limit;
      inside[lane] += beyond ? 0.0f : error;
      outside[lane] += beyond ? error : 0.0f;
      num_outside[lane] += beyond ? 1 : 0;
      largest[lane] = std::max(largest[lane], error);
    }
  }
  for (; i < squared.size(); ++i) {
    const bool beyond = values[i] > sums.inside_limit;
    (beyond ? outside : inside)[0] += values[i];
    num_outside[0] += beyond ? 1 : 0;
    largest[0] = std::max(largest[0], values[i]);
  }
  for (size_t lane = 0; lane < kLanes; ++lane) {
    sums.inside += inside[lane];
    sums.outside += outside[lane];
    sums.num_outside += num_outside[lane];
    sums.largest = std::max(sums.largest, largest[lane]);
  }
  return sums;
}

bool MayImprove(const ErrorSums& sums, std::span<const double> errors) {
  for (size_t j = 0; j < errors.size(); ++j) {
    const int beyond = static_cast<int>(j) - sums.num_outside;
    const float least = beyond >= 0
                            ? sums.inside - static_cast<float>(beyond) * sums.inside_limit
                            : sums.inside + sums.outside - static_cast<float>(j) * sums.largest;
    if (static_cast<double>(least) < errors[j]) return true;
  }
  return false;
}

bool ApproximateCurve(std::span<const float> squared, const ErrorSums& sums, GroupParams candidate,
                      std::vector<float>* outside, std::span<double> errors,
                      std::span<GroupParams> params) {
  constexpr int kBins = 32;
  float bin_sum[kBins + 1] = {};
  int bin_count[kBins + 1] = {};
  const float to_bin = static_cast<float>(kBins) / sums.inside_limit;
  outside->clear();
  for (const float error : squared) {
    if (error > sums.inside_limit) {
      outside->push_back(error);
      continue;
    }
    const int bin = static_cast<int>(error * to_bin);
    bin_sum[bin] += error;
    ++bin_count[bin];
  }
  std::sort(outside->begin(), outside->end());
  bool improved = false;
  const auto offer = [&](size_t left_out, double error) {
    if (left_out >= errors.size() || !(error < errors[left_out])) return;
    improved = true;
    errors[left_out] = error;
    params[left_out] = candidate;
  };
  double error = static_cast<double>(sums.inside);
  size_t left_out = outside->size();
  offer(left_out, error);
  for (const float value : *outside) {
    error += static_cast<double>(value);
    offer(--left_out, error);
  }
  error = static_cast<double>(sums.inside);
  left_out = outside->size();
  for (int bin = kBins; bin >= 0 && left_out + 1 < errors.size(); --bin) {
    const double mean =
        static_cast<double>(bin_sum[bin]) / static_cast<double>(std::max(bin_count[bin], 1));
    for (int i = 0; i < bin_count[bin]; ++i) {
      error -= mean;
      offer(++left_out, error);
    }
  }
  return improved;
}

}  // namespace flashquant
