// First half of quantizing a matrix whose groups lie inside tiles: how many outliers each group
// gets, and scale and zero point that suit that number.
//
// Error curves of all groups (int4_quantizer.h) are joined to curves of tile columns, records are
// chosen for the whole matrix (outlier_selector.h), and each tile column's slots go back to its
// groups. Round to nearest finishes from here (matrix_quantizer.h), GPTQ starts from here
// (gptq_quantizer.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/quantize/int4_quantizer.h"
#include "engine/quantize/matrix_quantizer.h"
#include "kernels/quantizer_ops.h"

namespace flashquant {

// What an error costs, by column of the matrix; empty spans: every error alike.
struct ColumnImportance {
  std::span<const float> within_group;  // [k] 0 .. 1, as GroupQuantizer::SetImportance
  std::span<const double> of_group;     // [groups per row] factor on top

  std::span<const float> Group(int64_t begin, size_t count) const {
    return within_group.empty() ? within_group
                                : within_group.subspan(static_cast<size_t>(begin), count);
  }
  double GroupFactor(int64_t group) const {
    return of_group.empty() ? 1.0 : of_group[static_cast<size_t>(group)];
  }
};

// A power of two that brings of_group below a limit, so that no sum of errors (of weights up to
// kMaxWeightMagnitude) leaves float's range: an infinite error means "cannot be" and nothing else.
double FactorScale(const ColumnImportance& importance);

struct GroupPlan {
  int64_t groups_per_row = 0;
  std::vector<GroupParams> params;  // [n, groups_per_row]
  std::vector<int32_t> outliers;    // [n, groups_per_row]; a multiple of four per tile and row
  std::vector<uint8_t> mask;        // [n, k] when the plan says which ones (row_plan.h), else empty
  double error_without = 0;         // sum of the errors' cost when none is left out
};

// The curves that the functions below need; options.group_size is not -1. Views its arguments.
CurveProblem MakeCurveProblem(std::span<const float> weights, int64_t n, int64_t k,
                              const MatrixQuantizerOptions& options,
                              const ColumnImportance& importance);

// `curves`: of MakeCurveProblem with the same options. Uses the whole budget of options.density as
// far as outliers help or, when options.least_benefit is above 0, every record that is worth it.
// The same for any options.num_threads.
GroupPlan PlanGroups(int64_t n, int64_t k, const MatrixQuantizerOptions& options,
                     const ColumnImportance& importance, GroupCurves curves);

// The errors' cost that a plan with each of these numbers of outlier records expects;
// options.density allows for the largest of them.
std::vector<double> ErrorsWithRecords(int64_t n, int64_t k, const MatrixQuantizerOptions& options,
                                      const ColumnImportance& importance, GroupCurves curves,
                                      std::span<const int64_t> num_records);

}  // namespace flashquant
