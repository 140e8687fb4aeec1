// AttentionPlan: cuts a step's sequences into tiles and, for single query rows (decode), into parts
// of their keys, so that few sequences with long contexts still fill the device. Host arithmetic
// only.
//
// Parts begin at fixed positions, multiples of kSplitKeys: what a row computes does not depend on
// the batch. Source: the split along keys of Flash-Decoding.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/backend/paged_attention/work.h"
#include "kernels/op_params.h"

namespace flashquant::cuda {

struct AttentionPlan {
  std::vector<AttentionItem> narrow;
  std::vector<AttentionItem> wide;
  std::vector<AttentionJoin> joins;
  int32_t num_partials = 0;
};

// `host_batch`: arrays in host memory. `group`: query heads of a KV head. sliding_window 0 = none.
// `wide_rows`: virtual rows of a wide tile.
AttentionPlan MakeAttentionPlan(const AttentionBatch& host_batch, int32_t group,
                                int32_t sliding_window, int32_t wide_rows);

}  // namespace flashquant::cuda
