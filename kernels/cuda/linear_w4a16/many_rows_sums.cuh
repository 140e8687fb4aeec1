// Sums of a tile in the many-rows kernel: where they are in the multiplying warpgroup's registers,
// their way to y, and the join of a tile that several blocks have parts of.
#pragma once

#include "kernels/cuda/linear_w4a16/many_rows_args.h"
#include "kernels/cuda/linear_w4a16/many_rows_dequant.cuh"

namespace flashquant::cuda {

// The warpgroup's sums: [64 channels of the tile][8 rows][channels n, n + 1 of rows 2t, 2t + 1].
template <int kRows>
using TileSums = float[2][kRows / 8][4];

// Writes a tile's sums to y.
template <int kRows>
__device__ __forceinline__ void WriteTile(const ManyRowsArgs& args, int tile, int warp, int lane,
                                          const TileSums<kRows>& sums) {
  const int first_row = tile % args.row_tiles * kRows;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const int strip = tile / args.row_tiles * kTileStrips + block * 2 + warp / 2;
    const int n = strip * kStripN +
                  4 * static_cast<int>(ChannelOfRow(static_cast<uint32_t>(lane) >> 2)) +
                  2 * (warp % 2);
    if (n >= args.n) continue;
#pragma unroll
    for (int nb = 0; nb < kRows / 8; ++nb) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = first_row + nb * 8 + 2 * (lane & 3) + j;
        if (row >= args.m) continue;
        *reinterpret_cast<__nv_bfloat162*>(args.y + row * args.y_stride + n) =
            __floats2bfloat162_rn(sums[block][nb][j], sums[block][nb][j + 2]);
      }
    }
  }
}

// Which block has unit `unit` of the line.
__device__ __forceinline__ int BlockOfUnit(const EvenSplit& units, int unit) {
  const int longer = units.remainder * (units.quotient + 1);
  return unit < longer ? unit / (units.quotient + 1)
                       : units.remainder + (unit - longer) / units.quotient;
}

// Leaves this block's sums of a tile in the workspace; the last block to do so adds all of them, in
// their order, and writes y. `thread`: of the multiplying warpgroup.
template <int kRows>
__device__ __forceinline__ void JoinTile(const ManyRowsArgs& args, int tile, int thread,
                                         TileSums<kRows>& sums) {
  __shared__ bool is_last;
  constexpr int kVectors = kRows / 4;
  const int tile_begin = tile * args.num_units;
  const int first = BlockOfUnit(args.units, tile_begin);
  const int last = BlockOfUnit(args.units, tile_begin + args.num_units - 1);
  // A block's first piece and its last one.
  const auto part = [&](int block) {
    const int which = args.units.Begin(block) >= tile_begin ? 0 : 1;
    return reinterpret_cast<float4*>(args.workspace) +
           (int64_t{block} * 2 + which) * kVectors * 128 + thread;
  };
  float4* const own = part(static_cast<int>(blockIdx.x));
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float(&v)[4] = sums[i / (kVectors / 2)][i % (kVectors / 2)];
    __stcg(own + i * 128, make_float4(v[0], v[1], v[2], v[3]));
  }
  __threadfence();
  asm volatile("bar.sync 1, 128;" ::: "memory");
  if (thread == 0) {
    is_last = atomicAdd(args.counters + tile, 1u) == static_cast<uint32_t>(last - first);
    if (is_last) args.counters[tile] = 0;
  }
  asm volatile("bar.sync 1, 128;" ::: "memory");
  if (!is_last) return;
  __threadfence();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float(&v)[4] = sums[i / (kVectors / 2)][i % (kVectors / 2)];
    v[0] = v[1] = v[2] = v[3] = 0.0f;
  }
  for (int block = first; block <= last; ++block) {
    const float4* const from = part(block);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float(&v)[4] = sums[i / (kVectors / 2)][i % (kVectors / 2)];
      const float4 add = __ldcg(from + i * 128);
      v[0] += add.x;
      v[1] += add.y;
      v[2] += add.z;
      v[3] += add.w;
    }
  }
  WriteTile<kRows>(args, tile, thread / 32, thread % 32, sums);
}

}  // namespace flashquant::cuda
