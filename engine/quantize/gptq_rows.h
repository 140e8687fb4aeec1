// The rows of one task of gptq_quantizer.h: first the GPTQ pass over the columns, then sweeps of
// coordinate descent. Not for use by itself.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/quantize/group_plan.h"
#include "engine/quantize/hessian_factor.h"
#include "engine/quantize/int4_quantizer.h"
#include "engine/quantize/quantized_matrix.h"

namespace flashquant {

struct GptqSums {
  double energy = 0;  // of the weights
  double error = 0;
  double output_energy = 0;
  double output_error = 0;
};

class GptqRows final {
 public:
  static constexpr int64_t kRows = 32;

  // Works on the rows first_row .. first_row + kRows - 1 of `weights`, as far as there are so many;
  // writes their part of `state`. All arguments outlive the object.
  GptqRows(std::span<const float> weights, const HessianFactor& factor, const GroupPlan& plan,
           int64_t first_row, MatrixState* state);

  // Instead of Quantize: starts from the codes, params and mask of the state, and its values where
  // the mask is set.
  void Load();
  // What each weight costs as a code and not an outlier, all the others given: costs [n, k] of the
  // whole matrix; -1 where its best value is zero in BF16.
  void OutlierGains(std::span<float> gains);
  // Groups in processing order: outliers and scale from the weights as compensated so far, then
  // column after column, each with the errors of those before.
  void Quantize();
  // Once over all groups: the scale, then each column again, best for what all the others are now.
  void Descend();
  // Writes codes, mask, values and params to the state.
  GptqSums Finish();

 private:
  // A row's group while its columns are gone through: what rounding needs.
  struct Rounding {
    alignas(64) float scale[kRows];
    alignas(64) float inverse[kRows];
    alignas(64) float zero[kRows];
  };

  int64_t GroupAt(int64_t place) const {
    return factor_.column_at[static_cast<size_t>(place)] / group_size_;
  }
  GroupParams& Params(int64_t row, int64_t group) {
    return state_->params[static_cast<size_t>((first_row_ + row) * groups_per_row_ + group)];
  }
  // First place of the group whose last place is end - 1.
  int64_t GroupBegin(int64_t end) const;
  void FitGroup(int64_t begin, int64_t end, std::span<const float> values);
  void UsePlannedMask(int64_t begin, int64_t end);
  void LoadRounding(int64_t group, Rounding* rounding);
  void RefitScales(int64_t begin, int64_t end);
  void ComputeGradient();

  const HessianFactor& factor_;
  const GroupPlan& plan_;
  const int64_t k_;
  const int64_t group_size_;
  const int64_t groups_per_row_;
  const int64_t first_row_;
  const int64_t num_rows_;
  MatrixState* const state_;
  GroupQuantizer quantizer_;
  // [place][kRows], rows that are not there are zero.
  std::vector<float> weights_;
  std::vector<float> errors_;    // weight - what stands for it
  std::vector<float> gradient_;  // damped Hessian times errors
  std::vector<uint8_t> mask_;
  std::vector<uint8_t> codes_;
  bool has_gradient_ = false;
  std::vector<float> change_;  // of the errors of one group
};

}  // namespace flashquant
