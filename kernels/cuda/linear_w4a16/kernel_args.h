// Arguments of the fused kernel: the launcher's parameters with shared-memory offsets worked out,
// and the arithmetic of who computes what.
//
// Strips are cut into `num_splits` even ranges and the units of K into `num_ranks`; block (r, s)
// has range s of the strips and r of K: few features, so that its activations stay in shared
// memory, and whole strips, so that sums only meet between the ranks of one split. A block's units,
// strip by strip, are cut evenly into one run per warp.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/linear_w4a16/run_table.h"
#include "kernels/cuda/linear_w4a16/shared_layout.h"
#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {

// Arguments are read from memory at each launch, 64 bytes when the first of them is used, and a
// warp waits each time: what comes before the first copy is together, and begins where they do, but
// for the two entries of `runs` that a warp takes.
struct KernelArgs {
  const uint8_t* dense;
  EvenSplit strips;   // over splits
  EvenSplit units;    // over ranks
  int32_t num_units;  // of a strip
  uint32_t unit_dense_bytes;
  int32_t num_warps;
  int32_t stages;
  uint32_t stage_bytes;
  SharedLayout shared;

  int32_t m;  // at most 8 * kBatchBlocks
  int32_t k;
  const __nv_bfloat16* x;
  int64_t x_stride;
  const OutlierRef* outlier_index;  // nullptr: no outliers
  const uint8_t* outliers;

  bool cluster_join;  // the launcher's: which instance, a cluster's or one without
  uint8_t join_first[kMaxClusterRanks + 1];  // [r]: the first group of rank r; 8 behind the last
  uint32_t join_groups;                      // groups of four channels that a rank owns at most
  int32_t join_slots;                        // of a warp, see RankExchange
  int32_t join_lag;
  int32_t join_parts;  // of a shared strip at most
  int32_t num_ranks;
  int32_t n;
  __nv_bfloat16* y;
  int64_t y_stride;
  float* workspace;
  uint32_t* counters;

  RunTable runs[2][2];  // [strips of the block, 1 more][units of a strip, 1 more]
};

}  // namespace flashquant::cuda
