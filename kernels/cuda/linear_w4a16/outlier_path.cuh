// Outlier part of a record: each outlier is one column of an MMA. Its A fragment has the value at
// the outlier's channel and zeros elsewhere, its x row comes by ldmatrix with the outlier's own
// address, and the product lands in the accumulators of the dense path: no second accumulator, no
// barrier, no atomics.
// Source: design "kernel" 4, strategy 3b, changed as packed_format.h says.
#pragma once

#include "kernels/cuda/linear_w4a16/dense_path.cuh"

namespace flashquant::cuda {

// A registers (channel g, channel g + 8) of a pair of slots.
__device__ __forceinline__ void ExpandSlots(const uint2& slots, uint32_t g_pair, uint32_t& low,
                                            uint32_t& high) {
  const uint32_t channels = slots.x & 0x000f000f;
  low = slots.y & EqualHalvesMask(channels, g_pair);
  high = slots.y & EqualHalvesMask(channels, g_pair | 0x00080008);
}

// Adds the outlier fragments from shared address `fragments` on to `acc`; ends[b]: fragments of
// blocks 0..b; `x` as in AddDense. Reads up to 3 fragments behind the last one of the record,
// inside the stage and its tail: what is there does not matter, its values are not used and its
// positions stay in the chunk.
template <int kBatchBlocks>
__device__ __forceinline__ void AddOutliers(const KernelArgs& args, uint32_t fragments, uint32_t x,
                                            const int (&ends)[kBlocksPerStrip], int lane,
                                            Accumulators<kBatchBlocks>& acc) {
  const uint32_t g_pair = (lane >> 2) * 0x00010001u;
  const uint32_t position_offset =
      (lane >> 3) * kFragmentBytes + ((lane & 7) >> 1) * 8 + (lane & 1) * 2;
  const uint32_t pair_offset = (lane & 3) * 8;
  int fragment = 0;
#pragma unroll
  for (int block = 0; block < kBlocksPerStrip; ++block) {
    const int end = ends[block];
    for (; fragment < end; fragment += 4) {
      const uint32_t base = fragments + fragment * kFragmentBytes;
      const uint32_t row = x + (LoadShared2(base + position_offset) & (kXChunkBytes - 16));
      uint32_t b[kBatchBlocks][4];
#pragma unroll
      for (int nb = 0; nb < kBatchBlocks; ++nb) {
        LdMatrixX4Trans(b[nb], row + nb * args.x_block_pitch);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (fragment + 2 * half >= end) continue;
        const uint2 first = LoadShared8(base + 2 * half * kFragmentBytes + pair_offset);
        uint2 second = LoadShared8(base + (2 * half + 1) * kFragmentBytes + pair_offset);
        if (fragment + 2 * half + 1 >= end) second.y = 0;
        uint32_t a[4];
        ExpandSlots(first, g_pair, a[0], a[1]);
        ExpandSlots(second, g_pair, a[2], a[3]);
#pragma unroll
        for (int nb = 0; nb < kBatchBlocks; ++nb) {
          MmaBf16(acc[block][nb], a, b[nb][2 * half], b[nb][2 * half + 1], acc[block][nb]);
        }
      }
    }
    fragment = end;
  }
}

}  // namespace flashquant::cuda
