// INT4 part of a unit on integer tensor cores, for up to 8 rows: a code is a signed byte after one
// logic operation on four of them, 16 * (q - 8), and x is two signed digits (activations.cuh). Two
// INT8 MMAs take 32 features where BF16 takes two of 16, but A fragments cost less than half the
// instructions, which is what limits the BF16 form; sums are exact in INT32 until a group's scale
// is applied. On consumer cards, whose BF16 MMAs run at half rate, the tensor cores have half as
// much to do as well.
#pragma once

#include "kernels/cuda/linear_w4a16/activations.cuh"
#include "kernels/cuda/linear_w4a16/dense_common.cuh"

namespace flashquant::cuda {

// A fragment for 32 features: words of the two k16 steps.
__device__ __forceinline__ void ExpandToInt8(uint32_t word0, uint32_t word1, uint32_t (&a)[4]) {
  constexpr uint32_t kHighNibbles = 0xf0f0f0f0;
  a[0] = word0 << 4 & kHighNibbles;
  a[1] = word0 & kHighNibbles;
  a[2] = word1 << 4 & kHighNibbles;
  a[3] = word1 & kHighNibbles;
}

// acc += scale of weight and activation * (256 * high + low), for one block and batch block.
// `zero_pair`: 128 + z of channels g and g + 8, used with zero points; `sum`: of digits' values.
template <bool kZeros>
__device__ __forceinline__ void AddScaled(const int32_t (&high)[4], const int32_t (&low)[4],
                                          uint32_t scale_pair, const float2& x_scale,
                                          uint32_t zero_pair, const float2& sum, float (&acc)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float weight_scale = j < 2 ? LowBf16(scale_pair) : HighBf16(scale_pair);
    const float scale = weight_scale * (j % 2 == 0 ? x_scale.x : x_scale.y);
    float value = static_cast<float>(high[j] * 256 + low[j]);
    if (kZeros) {
      const float zero = 16.0f * (136.0f - (j < 2 ? LowBf16(zero_pair) : HighBf16(zero_pair)));
      value += zero * (j % 2 == 0 ? sum.x : sum.y);
    }
    acc[j] += scale * value;
  }
}

__device__ __forceinline__ float2 LoadRowPair(uint32_t shared_address) {
  const uint2 words = LoadShared8(shared_address);
  return {__uint_as_float(words.x), __uint_as_float(words.y)};
}

// Adds the chunk at shared address `record` to `acc`. `digits`, `x_scales`, `sums`: shared
// addresses of the chunk's parts, the first at the lane's 16 bytes.
template <int kBatchBlocks, int kGroups, bool kZeros>
__device__ __forceinline__ void AddDenseInt8(uint32_t record, uint32_t digits, uint32_t x_scales,
                                             uint32_t sums, int lane,
                                             Accumulators<kBatchBlocks>& acc) {
  constexpr int kPairs = 4 / kGroups;  // k32 steps in a group
  const uint32_t scales = record + kCodeBytes + (lane >> 2) * 8;
  const uint32_t row_pair = (lane & 3) * 8;
  uint4 codes[4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) codes[pair] = LoadShared16(record + pair * 512 + lane * 16);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    int32_t high[kBlocksPerStrip][kBatchBlocks][4] = {};
    int32_t low[kBlocksPerStrip][kBatchBlocks][4] = {};
#pragma unroll
    for (int pair = group * kPairs; pair < (group + 1) * kPairs; ++pair) {
      uint4 b[kBatchBlocks];
#pragma unroll
      for (int nb = 0; nb < kBatchBlocks; ++nb) {
        b[nb] = LoadShared16(digits + (pair * kBatchBlocks + nb) * 512);
      }
#pragma unroll
      for (int block = 0; block < kBlocksPerStrip; ++block) {
        uint32_t a[4];
        ExpandToInt8(WordOf(codes[pair], block), WordOf(codes[pair], 2 + block), a);
#pragma unroll
        for (int nb = 0; nb < kBatchBlocks; ++nb) {
          MmaInt8(high[block][nb], a, b[nb].x, b[nb].y);
          MmaInt8(low[block][nb], a, b[nb].z, b[nb].w);
        }
      }
    }
    const uint2 scale_words = LoadShared8(scales + group * kGroupScaleBytes);
    uint2 zero_words = {0, 0};
    if (kZeros) zero_words = LoadShared8(scales + (kGroups + group) * kGroupScaleBytes);
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
      const float2 x_scale = LoadRowPair(x_scales + nb * kRowsPerBatchBlock * 4 + row_pair);
      float2 sum = {0.0f, 0.0f};
      if (kZeros) {
        sum = LoadRowPair(sums + (group * kBatchBlocks + nb) * kRowsPerBatchBlock * 4 + row_pair);
      }
#pragma unroll
      for (int block = 0; block < kBlocksPerStrip; ++block) {
        AddScaled<kZeros>(high[block][nb], low[block][nb],
                          block == 0 ? scale_words.x : scale_words.y, x_scale,
                          block == 0 ? zero_words.x : zero_words.y, sum, acc[block][nb]);
      }
    }
  }
}

}  // namespace flashquant::cuda
