// INT4 part of a unit on BF16 tensor cores, for more than 8 rows: codes become MMA A fragments in
// registers by one shift and one logic operation a register, 128 + q in BF16. The bias and the zero
// point are taken out by starting each group's accumulators at -(128 + z) * sum(x), in FP32; the
// group's scale multiplies the accumulators. No weight is ever rounded.
// Source: the nibble order of Marlin-type kernels; design "kernel" 3.1 and 3.2 ("no subtract").
#pragma once

#include "kernels/cuda/linear_w4a16/activations.cuh"
#include "kernels/cuda/linear_w4a16/dense_common.cuh"

namespace flashquant::cuda {

// Registers 0..3 of the A fragment in a word of codes (packed_format.h).
__device__ __forceinline__ void ExpandCodes(uint32_t word, uint32_t (&a)[4]) {
  constexpr uint32_t kNibbles = 0x000f000f;
  constexpr uint32_t k136 = 0x43084308;  // 128 in both halves, and codes are stored as q ^ 8
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    // One instruction for (word & kNibbles) ^ k136; the compiler alone makes two of it.
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;"
        : "=r"(a[r])
        : "r"(word >> (4 * r)), "n"(kNibbles), "r"(k136));
  }
}

// Starts of the group's accumulators: -(128 + z) * sum(x) for channels g and g + 8.
__device__ __forceinline__ void BiasStart(uint32_t zero_pair, const float2& sum,
                                          float (&start)[4]) {
  const float low = -LowBf16(zero_pair);
  const float high = -HighBf16(zero_pair);
  start[0] = low * sum.x;
  start[1] = low * sum.y;
  start[2] = high * sum.x;
  start[3] = high * sum.y;
}

// B fragments of two k16 steps.
template <int kBatchBlocks>
__device__ __forceinline__ void LoadXPair(uint32_t x, uint32_t x_block_pitch,
                                          uint32_t (&b)[kBatchBlocks][4]) {
#pragma unroll
  for (int nb = 0; nb < kBatchBlocks; ++nb) LdMatrixX4Trans(b[nb], x + nb * x_block_pitch);
}

// Adds the chunk at shared address `record` to `acc`. `x`: shared address of the chunk in batch
// block 0, at the lane's row (LaneXRow); `sums`: shared address of the chunk's group sums.
template <int kBatchBlocks, int kGroups, bool kZeros>
__device__ __forceinline__ void AddDenseBf16(const KernelArgs& args, uint32_t record, uint32_t x,
                                             uint32_t sums, int lane,
                                             Accumulators<kBatchBlocks>& acc) {
  constexpr int kPairs = 4 / kGroups;  // pairs of k16 steps in a group
  const uint32_t scales = record + kCodeBytes + (lane >> 2) * 8;
  // Everything that fits is loaded before the first use: a warp has nothing else to hide latency.
  uint4 codes[4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) codes[pair] = LoadShared16(record + pair * 512 + lane * 16);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const uint2 scale_words = LoadShared8(scales + group * kGroupScaleBytes);
    uint2 zero_words = {0x43084308, 0x43084308};  // 128 + 8
    if (kZeros) {
      zero_words = LoadShared8(scales + (kGroups + group) * kGroupScaleBytes);
    }
    float part[kBlocksPerStrip][kBatchBlocks][4];
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
      const uint2 sum_words = LoadShared8(
          sums + ((group * kBatchBlocks + nb) * kRowsPerBatchBlock + 2 * (lane & 3)) * 4);
      const float2 sum = {__uint_as_float(sum_words.x), __uint_as_float(sum_words.y)};
#pragma unroll
      for (int block = 0; block < kBlocksPerStrip; ++block) {
        BiasStart(block == 0 ? zero_words.x : zero_words.y, sum, part[block][nb]);
      }
    }
#pragma unroll
    for (int pair = group * kPairs; pair < (group + 1) * kPairs; ++pair) {
      uint32_t b[kBatchBlocks][4];
      LoadXPair<kBatchBlocks>(x + pair * 512, args.shared.x_block_pitch, b);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < kBlocksPerStrip; ++block) {
          uint32_t a[4];
          ExpandCodes(WordOf(codes[pair], 2 * half + block), a);
#pragma unroll
          for (int nb = 0; nb < kBatchBlocks; ++nb) {
            MmaBf16(part[block][nb], a, b[nb][2 * half], b[nb][2 * half + 1], part[block][nb]);
          }
        }
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocksPerStrip; ++block) {
      const uint32_t scale_pair = block == 0 ? scale_words.x : scale_words.y;
      const float low = LowBf16(scale_pair);
      const float high = HighBf16(scale_pair);
#pragma unroll
      for (int nb = 0; nb < kBatchBlocks; ++nb) {
        acc[block][nb][0] += low * part[block][nb][0];
        acc[block][nb][1] += low * part[block][nb][1];
        acc[block][nb][2] += high * part[block][nb][2];
        acc[block][nb][3] += high * part[block][nb][3];
      }
    }
  }
}

}  // namespace flashquant::cuda
