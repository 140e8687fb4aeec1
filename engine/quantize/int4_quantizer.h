// INT4 quantization of one group of weights: scale and zero point searched for least squared error
// when the group may leave some weights out (the outliers, which Tile-COO stores in BF16).
//
// Which groups may leave out how many is decided elsewhere (outlier_selector.h); whole matrices are
// in matrix_quantizer.h. Everything here is a pure function of its arguments, so results do not
// depend on threads.
//
// The search is exact on its grid: for one (scale, zero) the best weights to leave out are those
// with the largest errors, whatever their magnitude, so one pass over the grid gives the least
// error for every number of left-out weights at once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/base/bfloat16.h"
#include "kernels/format/group_params.h"

namespace flashquant {

class SortedGroup;

class GroupQuantizer final {
 public:
  // symmetric: the zero point is always 8. An object holds scratch memory: one per thread.
  explicit GroupQuantizer(bool symmetric);
  ~GroupQuantizer();

  // From now on the squared error of weight i counts `importance[i]` times (0 .. 1, as many as the
  // weights of the next calls; kept by reference). Empty: all count alike.
  void SetImportance(std::span<const float> importance) { importance_ = importance; }

  // errors[j] = least sum of squared errors of `weights` (finite, at most kMaxWeightMagnitude) with
  // j weights left out, j = 0 .. errors.size() - 1, and params[j] what reaches it. Never rises with
  // j. Infinite where the group has fewer than j weights that are not zero in BF16 (a zero weight
  // never gets an outlier slot).
  void ErrorCurve(std::span<const float> weights, std::span<double> errors,
                  std::span<GroupParams> params);

  // Improves *params for `num_outliers` left-out weights by least squares and neighbouring scales
  // and zero points; returns the error reached, which is never above the error of the *params
  // given.
  double Refine(std::span<const float> weights, int num_outliers, GroupParams* params);

  // The best params for `weights` with none left out: ErrorCurve, then Refine.
  GroupParams Fit(std::span<const float> weights);

  // Sum of squared errors under `params` without the `num_outliers` largest.
  double Error(std::span<const float> weights, GroupParams params, int num_outliers);

  // Indices of the `count` weights with the largest errors under `params`, largest first; ties go
  // to the larger magnitude, then the lower index; weights that are zero in BF16 come last.
  void LargestErrors(std::span<const float> weights, GroupParams params, int count,
                     std::vector<int32_t>* indices);

 private:
  // squared_ = the errors of `weights`, times their importance.
  void Measure(std::span<const float> weights, GroupParams params);
  // Both update approximate_ and candidates_; the first returns whether it improved anything.
  bool TryCandidate(GroupParams candidate);
  // ends: sum of the least and the largest weight, with and without the extremes.
  void SearchZeroPoints(GroupParams candidate, float inner_ends, float ends);
  // Lowers `errors` to what `candidate` gives, up to number `last`, by sorting.
  void AddExactCurve(std::span<const float> weights, GroupParams candidate, size_t last,
                     std::span<double> errors, std::span<GroupParams> params);
  // Keeps `candidate` when it is better than *params by SortedGroup's measure.
  void Compare(GroupParams candidate, int num_outliers, float* best, GroupParams* params);
  void FitScales(std::span<const float> weights, int num_outliers, float* best,
                 GroupParams* params);

  const bool symmetric_;
  std::span<const float> importance_;
  std::unique_ptr<SortedGroup> sorted_;
  std::vector<float> squared_;
  std::vector<float> kept_;
  std::vector<int32_t> order_;
  std::vector<float> approximate_;
  std::vector<GroupParams> candidates_;
};

// The code of `weight`: nearest of the 16 levels.
uint8_t EncodeInt4(float weight, GroupParams params);

// Squared error of each weight under `params`; same sizes.
void SquaredErrors(std::span<const float> weights, GroupParams params, std::span<float> squared);

}  // namespace flashquant
