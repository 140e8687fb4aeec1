// Scales and outliers of a matrix by scores: select the weights with the largest scores at the
// present scales, fit the scales again without them, and again while it gets better.
//
// For one group per row, whose outliers lie in several tiles, and for the two simpler rules; groups
// inside tiles have group_plan.h. Also the selection alone, for scores from elsewhere.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/quantize/group_plan.h"
#include "engine/quantize/int4_quantizer.h"
#include "engine/quantize/matrix_quantizer.h"

namespace flashquant {

struct RowPlan {
  std::vector<GroupParams> params;  // [n, groups per row]; one group per row for group_size -1
  std::vector<uint8_t> mask;        // [n, k], 1 = outlier
  double error_without = 0;         // sum of the errors' cost when none is left out
};

// The same for any options.num_threads.
RowPlan PlanByScore(std::span<const float> weights, int64_t n, int64_t k,
                    const MatrixQuantizerOptions& options, const ColumnImportance& importance);

// The mask [n, k] of the records with the largest sums of `scores` [n, k], as many as
// RecordBudget(n, k, options) allows and as are worth options.least_benefit a weight. A weight
// whose score is below 0 gets no slot.
std::vector<uint8_t> SelectByScore(std::span<const float> scores, int64_t n, int64_t k,
                                   const MatrixQuantizerOptions& options);

}  // namespace flashquant
