// AttentionPlan: cuts the sequences of a step that have more than one query row (prefill) into
// tiles. Those with one need no plan (decode.cuh). Host arithmetic only.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/backend/paged_attention/work.h"
#include "kernels/op_params.h"

namespace flashquant::cuda {

struct AttentionPlan {
  std::vector<AttentionItem> wide;
  int32_t num_single_rows = 0;  // sequences of one query row
};

// `host_batch`: arrays in host memory. `group`: query heads of a KV head. sliding_window 0 = none.
// `wide_rows`: virtual rows of a wide tile.
AttentionPlan MakeAttentionPlan(const AttentionBatch& host_batch, int32_t group,
                                int32_t sliding_window, int32_t wide_rows);

}  // namespace flashquant::cuda
