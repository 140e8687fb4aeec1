// INT4 part of a unit on BF16 tensor cores. Codes are A fragments without being converted: a number
// of up to eight bits in the low bits of a BF16 is that integer times 2^-133, a subnormal number
// (or, from 128 on, a normal one, which continues the row), and tensor cores take subnormal numbers
// as any other. So a word of codes (packed_format.h) gives, of two channels 2 apart, half a row
// each of two fragments in four instructions: bytes, 16 * q' + q, and their low nibbles, q. The
// sums of q are taken off those of 16 * q' + q, eights are taken off by what the sums begin with,
// and a group's scale multiplies the sums, in FP32. No weight is ever rounded. x is staged times
// 2^kXExponent, so that products are far from FP32's own subnormal numbers; outliers are stored
// times its inverse.
// Source: design "kernel" 3.1 and 3.2 ("no subtract"); conversion-free fragments are our own.
#pragma once

#include "kernels/cuda/linear_w4a16/codes.cuh"
#include "kernels/cuda/linear_w4a16/kernel_args.h"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

// A strip's sums of a warp: lane (g, t) has channels g, g + 8 of each block and rows 2t, 2t + 1 of
// each batch block.
template <int kBatchBlocks>
using Accumulators = float[kBlocksPerStrip][kBatchBlocks][4];

__device__ __forceinline__ uint32_t WordOf(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Of the factors that bring the sums of a block, as tensor cores make them, to their true size: 133
// for the codes' unit, less what x is staged with, and for block 1 less 4 for its factor of 16.
inline constexpr int kBlockExponent0 = 133 - kXExponent;
inline constexpr int kBlockExponent1 = kBlockExponent0 - 4;

// A group's scales of a block's channels g and g + 8, for its sums.
__device__ __forceinline__ float2 SumScales(uint32_t scale_pair, int block_exponent) {
  const uint32_t scaled = TimesPowerOfTwo(scale_pair, block_exponent);
  return {LowBf16(scaled), HighBf16(scaled)};
}

// A fragments of a k16 step from the words of rows g and g + 8: `bytes` of 16 * q' + q, `nibbles`
// of q.
__device__ __forceinline__ void ExpandCodes(uint32_t first, uint32_t second, uint32_t (&bytes)[4],
                                            uint32_t (&nibbles)[4]) {
  bytes[0] = first & 0x00ff00ff;
  bytes[1] = second & 0x00ff00ff;
  bytes[2] = __byte_perm(first, 0, 0x4341);
  bytes[3] = __byte_perm(second, 0, 0x4341);
#pragma unroll
  for (int i = 0; i < 4; ++i) nibbles[i] = bytes[i] & 0x000f000f;
}

__device__ __forceinline__ void LoadStart(uint32_t address, float (&start)[4]) {
  const uint4 words = LoadShared16(address);
#pragma unroll
  for (int j = 0; j < 4; ++j) start[j] = __uint_as_float(WordOf(words, j));
}

// acc += scale * sum for a block and batch block. With zero points, `zero_pair` is 128 + z of
// channels g and g + 8, `eights` what block 0's sums began with, and `zero_unit` the sum's unit
// over eight.
template <bool kZeros>
__device__ __forceinline__ void AddScaled(const float2& scales, uint32_t zero_pair,
                                          const float (&eights)[4], float zero_unit,
                                          const float (&sum)[4], float (&acc)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float value = sum[j];
    if (kZeros) {
      const float zero = j < 2 ? LowBf16(zero_pair) : HighBf16(zero_pair);
      value = fmaf((zero - 136.0f) * zero_unit, eights[j], value);
    }
    acc[j] = fmaf(j < 2 ? scales.x : scales.y, value, acc[j]);
  }
}

// Adds the chunk at shared address `record` to `acc`. `x`: shared address of the chunk in batch
// block 0, at the lane's row (LaneXRow); `starts`: shared address of the chunk's starts of sums.
template <int kBatchBlocks, int kGroups, bool kZeros>
__device__ __forceinline__ void AddDense(const KernelArgs& args, uint32_t record, uint32_t x,
                                         uint32_t starts, int lane,
                                         Accumulators<kBatchBlocks>& acc) {
  constexpr int kPairs = 4 / kGroups;  // pairs of k16 steps in a group
  const uint32_t lane_starts = starts + (lane & 3) * 16;
  const uint32_t scales = record + kCodeBytes + (lane >> 2) * 8;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const uint32_t group_starts = lane_starts + group * kBatchBlocks * kStartBytes;
    // Everything that fits is loaded before the first use: a warp has nothing else to hide latency.
    uint4 codes[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      codes[i] = LoadShared16(record + (group * kPairs + i) * 512 + lane * 16);
    }
    float start[kBlocksPerStrip][kBatchBlocks][4];
    float part[kBlocksPerStrip][kBatchBlocks][4];
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
#pragma unroll
      for (int block = 0; block < kBlocksPerStrip; ++block) {
        LoadStart(group_starts + nb * kStartBytes + block * 64, start[block][nb]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      uint32_t b[kBatchBlocks][4];
#pragma unroll
      for (int nb = 0; nb < kBatchBlocks; ++nb) {
        LdMatrixX4Trans(b[nb], x + (group * kPairs + pair) * 512 + nb * args.shared.x_block_pitch);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool begins = pair == 0 && half == 0;
        uint32_t a[kBlocksPerStrip][4];
        ExpandCodes(WordOf(codes[pair], 2 * half), WordOf(codes[pair], 2 * half + 1), a[1], a[0]);
#pragma unroll
        for (int block = 0; block < kBlocksPerStrip; ++block) {
#pragma unroll
          for (int nb = 0; nb < kBatchBlocks; ++nb) {
            MmaBf16(part[block][nb], a[block], b[nb][2 * half], b[nb][2 * half + 1],
                    begins ? start[block][nb] : part[block][nb]);
          }
        }
      }
    }
    const uint2 scale_words = LoadShared8(scales + group * kGroupScaleBytes);
    const float2 scale0 = SumScales(scale_words.x, kBlockExponent0);
    const float2 scale1 = SumScales(scale_words.y, kBlockExponent1);
    uint2 zeros = {0, 0};
    if (kZeros) zeros = LoadShared8(scales + (kGroups + group) * kGroupScaleBytes);
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
      float second[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) second[j] = part[1][nb][j] - part[0][nb][j];
      float eights[4] = {};  // loaded again, not kept: there are no registers for it
      if (kZeros) LoadStart(group_starts + nb * kStartBytes, eights);
      AddScaled<kZeros>(scale0, zeros.x, eights, 0.125f, part[0][nb], acc[0][nb]);
      AddScaled<kZeros>(scale1, zeros.y, eights, 2.0f, second, acc[1][nb]);
    }
  }
}

}  // namespace flashquant::cuda
