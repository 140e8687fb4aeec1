// What both forms of the dense path share.
#pragma once

#include "kernels/cuda/linear_w4a16/kernel_args.h"

namespace flashquant::cuda {

// A strip's sums of a warp: lane (g, t) has channels g, g + 8 of each block and rows 2t, 2t + 1 of
// each batch block.
template <int kBatchBlocks>
using Accumulators = float[kBlocksPerStrip][kBatchBlocks][4];

__device__ __forceinline__ uint32_t WordOf(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

}  // namespace flashquant::cuda
