#include "kernels/cuda/backend/paged_attention/plan.h"

#include <algorithm>

#include "kernels/base/math_util.h"

namespace flashquant::cuda {
namespace {

constexpr int32_t kKeyTile = 64;

// The first key that the row at `position` sees.
int32_t FirstKey(int32_t position, int32_t sliding_window) {
  return sliding_window > 0 ? std::max(0, position + 1 - sliding_window) : 0;
}

// A single row's tiles: usually one, more when many heads share a KV head.
void AddDecodeRow(int32_t sequence, int32_t context, int32_t group, int32_t sliding_window,
                  AttentionPlan* plan) {
  const int32_t first_part = FirstKey(context - 1, sliding_window) / kSplitKeys;
  const int32_t num_parts = CeilDiv(context, kSplitKeys) - first_part;
  for (int32_t first_row = 0; first_row < group; first_row += kNarrowRows) {
    const int32_t num_rows = std::min(kNarrowRows, group - first_row);
    const int32_t first_partial = plan->num_partials;
    for (int32_t part = 0; part < num_parts; ++part) {
      const int32_t first_key = (first_part + part) * kSplitKeys;
      plan->narrow.push_back({.sequence = sequence,
                              .first_row = first_row,
                              .num_rows = num_rows,
                              .first_key = first_key,
                              .end_key = std::min(context, first_key + kSplitKeys),
                              .partial = num_parts == 1 ? kWholeRow : first_partial + part});
    }
    if (num_parts == 1) continue;
    plan->num_partials += num_parts;
    plan->joins.push_back({.sequence = sequence,
                           .first_row = first_row,
                           .num_rows = num_rows,
                           .first_partial = first_partial,
                           .num_partials = num_parts});
  }
}

void AddPrefillRows(int32_t sequence, int32_t num_query_rows, int32_t context, int32_t group,
                    int32_t sliding_window, int32_t wide_rows, AttentionPlan* plan) {
  const int32_t num_virtual = num_query_rows * group;
  const int32_t first_position = context - num_query_rows;
  for (int32_t first_row = 0; first_row < num_virtual; first_row += wide_rows) {
    const int32_t num_rows = std::min(wide_rows, num_virtual - first_row);
    const int32_t first = first_position + first_row / group;
    const int32_t last = first_position + (first_row + num_rows - 1) / group;
    plan->wide.push_back({.sequence = sequence,
                          .first_row = first_row,
                          .num_rows = num_rows,
                          .first_key = FirstKey(first, sliding_window) / kKeyTile * kKeyTile,
                          .end_key = last + 1});
  }
}

}  // namespace

AttentionPlan MakeAttentionPlan(const AttentionBatch& host_batch, int32_t group,
                                int32_t sliding_window, int32_t wide_rows) {
  AttentionPlan plan;
  for (int32_t sequence = 0; sequence < host_batch.num_sequences; ++sequence) {
    const int32_t num_query_rows =
        host_batch.query_indptr[sequence + 1] - host_batch.query_indptr[sequence];
    const int32_t context = host_batch.context_lengths[sequence];
    if (num_query_rows == 1) {
      AddDecodeRow(sequence, context, group, sliding_window, &plan);
    } else {
      AddPrefillRows(sequence, num_query_rows, context, group, sliding_window, wide_rows, &plan);
    }
  }
  return plan;
}

}  // namespace flashquant::cuda
