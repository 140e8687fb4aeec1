// Planner: who computes what. Cuts a packed layer's records into one contiguous run per warp,
// weighed by bytes, so that tiles full of outliers balance by themselves; decides the K slices and
// numbers the partial sums. Pure host arithmetic, made once per layer, batch size and device.
// Source: Stream-K; design "kernel" 6.
// Deviation: K is first divided into slices, so that a block's activations stay in shared memory
// for its whole run.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/linear_w4a16/pack.h"
#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

struct PlanOptions {
  int num_blocks = 0;   // of the grid; normally the number of SMs
  int num_slices = 1;   // of K; reduced to what the layer and the grid allow
  int num_warps = 16;   // of a block; 8 for more than 16 rows
  int unit_chunks = 2;  // dense records in one copy, 1 or 2
};

struct LinearPlan {
  std::vector<Unit> units;
  std::vector<WarpPlan> warps;  // [num_blocks * num_warps]
  std::vector<RowInfo> rows;    // [num_slices * num_strips]
  int32_t num_blocks = 0;
  int32_t num_warps = 0;
  int32_t stage_bytes = 0;  // the largest unit
  int32_t num_slices = 0;
  int32_t slice_chunks = 0;  // the longest slice
  int32_t num_first_slots = 0;
  int64_t num_pieces = 0;  // partial sums in the workspace
};

LinearPlan MakeLinearPlan(const PackedLinear& packed, const PlanOptions& options);

// Slices that keep a block's activations within `x_bytes_limit` of shared memory for
// `batch_blocks` * 8 rows, and no longer than a block's share of the layer needs.
int ChooseNumSlices(const PackedLinear& packed, int num_blocks, int batch_blocks,
                    int64_t x_bytes_limit);

}  // namespace flashquant::cuda
