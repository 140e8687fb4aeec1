// Brings a block's slice of the activations into shared memory in the forms that its paths read:
//   K-major BF16, 16 bytes (8 batch rows) per feature, so that ldmatrix.trans gives MMA B fragments
//   and one outlier's values are one 16-byte row (in the order of XRow);
//   for the integer path also B fragments of two signed digits: x = scale * (256 * high + low) with
//   one scale per row and chunk, the largest value of which becomes 32512. A value's error is at
//   most 0.51 of a scale, 2^-16 of the row's largest in the chunk.
// Also sums x over each quantization group where the dense path needs them for zero points.
#pragma once

#include "kernels/cuda/linear_w4a16/kernel_args.h"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

inline constexpr uint32_t kXChunkBytes = kChunkK * 16;
inline constexpr float kDigitLimit = 32512.0f;  // 127 * 256

// Bytes from a chunk's start to the row that a lane names in an ldmatrix or stmatrix for two k16
// steps: rows stand in the MMAs' order (XRow).
__device__ __forceinline__ uint32_t LaneXRow(int lane) { return static_cast<uint32_t>(lane) * 16; }

// Where a lane loads its part of the slice from: of row lane / 4 of each batch block, for each 32
// features eight neighbours, of which lanes 0, 1, 2, 3 take those from 0, 16, 8 and 24 on. Half as
// many bytes a lane would ask for every sector of a row on its own, which takes longer than the
// latency.
class XSource {
 public:
  // Worked out in full before this returns: it is used first where every instruction delays all.
  __device__ XSource(const KernelArgs& args, int first_chunk, int lane)
      : rows_left_(args.m - (lane >> 2)), block_pitch_(args.x_stride * kRowsPerBatchBlock) {
    const int k0 = first_chunk * kChunkK + (lane & 1) * 16 + (lane & 2) * 4;
    features_left_ = args.k - k0;
    source_ = args.x + (lane >> 2) * args.x_stride + k0;
    asm volatile("" : "+l"(source_), "+l"(block_pitch_), "+r"(features_left_), "+r"(rows_left_));
  }

  // `chunk`: in the slice. Zero beyond m and k.
  __device__ void Load(int chunk, int batch_block, uint32_t (&v)[4][4]) const {
    const __nv_bfloat16* source = source_ + batch_block * block_pitch_ + chunk * kChunkK;
    const int left = batch_block * kRowsPerBatchBlock < rows_left_ ? features_left_ : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool inside = chunk * kChunkK + 32 * i < left;
      const uint4 words = inside ? LoadGlobal16(source + 32 * i) : uint4{0, 0, 0, 0};
      v[i][0] = words.x;
      v[i][1] = words.y;
      v[i][2] = words.z;
      v[i][3] = words.w;
    }
  }

 private:
  const __nv_bfloat16* source_;
  int rows_left_;
  int features_left_;
  int64_t block_pitch_;
};

// Makes of what XSource loads what MMAs ask of a lane: for each 32 features 4 * (lane % 4) .. + 3
// and 16 more.
__device__ __forceinline__ void TradeHalves(int lane, uint32_t (&v)[4][4]) {
  const bool odd = (lane & 1) != 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? v[i][j] : v[i][j + 2], 1);
      if (odd) {
        v[i][j] = got;
      } else {
        v[i][j + 2] = got;
      }
    }
  }
}

// Over the four lanes of a row.
__device__ __forceinline__ float RowSum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// To two units in the last place, which is less than a hundredth of a digit.
__device__ __forceinline__ float FastReciprocal(float v) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v));
  return inverse;
}

// The largest magnitude in the row's chunk, as BF16 bits; NaN is larger than all.
__device__ __forceinline__ uint32_t RowMagnitude(const uint32_t (&v)[4][4]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) most = __vmaxu2(most, v[i][j] & 0x7fff7fff);
  }
  most = max(most & 0xffff, most >> 16);
  most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
  return max(most, __shfl_xor_sync(0xffffffffu, most, 2));
}

// Adding 1.5 * 2^23 leaves the rounded integer in the low bits of a float.
inline constexpr float kRoundingBias = 12582912.0f;

// 256 * high + low of a value's digits.
__device__ __forceinline__ float DigitsValue(float value, float inverse) {
  return fmaf(value, inverse, kRoundingBias) - kRoundingBias;
}

// Digits of four features: bytes in the order 0, 2, 1, 3 of the codes.
struct DigitWords {
  uint32_t high;
  uint32_t low;
};
__device__ __forceinline__ DigitWords ToDigits(uint32_t pair0, uint32_t pair1, float inverse) {
  // 128 more make the low byte low + 128 and the next one high.
  constexpr float kMagic = kRoundingBias + 128.0f;
  const uint32_t u0 = __float_as_uint(fmaf(LowBf16(pair0), inverse, kMagic));
  const uint32_t u1 = __float_as_uint(fmaf(HighBf16(pair0), inverse, kMagic));
  const uint32_t u2 = __float_as_uint(fmaf(LowBf16(pair1), inverse, kMagic));
  const uint32_t u3 = __float_as_uint(fmaf(HighBf16(pair1), inverse, kMagic));
  const uint32_t even = __byte_perm(u0, u2, 0x5140);
  const uint32_t odd = __byte_perm(u1, u3, 0x5140);
  return {__byte_perm(even, odd, 0x7632), __byte_perm(even, odd, 0x5410) ^ 0x80808080u};
}

// Sums over groups of a lane's values; the lanes with lane % 4 == 0 store them for their row.
template <int kGroups, typename Value>
__device__ __forceinline__ void StoreSums(float* sums, int batch_blocks, int lane, Value&& value) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float sum = 0.0f;
#pragma unroll
    for (int i = group * 4 / kGroups; i < (group + 1) * 4 / kGroups; ++i) sum += value(i);
    sum = RowSum(sum);
    if ((lane & 3) == 0) sums[group * batch_blocks * kRowsPerBatchBlock + (lane >> 2)] = sum;
  }
}

// `v`: as TradeHalves leaves it; `chunk`: in the slice.
template <int kBatchBlocks, int kGroups, bool kZeros>
__device__ __forceinline__ void StoreXChunk(const KernelArgs& args, const uint32_t (&v)[4][4],
                                            int chunk, int batch_block, uint8_t* shared, int lane) {
  constexpr bool kDigits = UsesDigits(kBatchBlocks);
  const int slot = (chunk * kBatchBlocks + batch_block) * kRowsPerBatchBlock;
  float* sums = reinterpret_cast<float*>(shared + args.shared.sums_offset) +
                (chunk * kGroups * kBatchBlocks + batch_block) * kRowsPerBatchBlock;
  if (!kDigits || args.outlier_index != nullptr) {
    const uint32_t x = SharedAddress(shared + args.shared.x_offset) +
                       batch_block * args.shared.x_block_pitch + chunk * kXChunkBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) StoreTransposedX4(x + i * 512, LaneXRow(lane), lane, v[i]);
  }
  if (!kDigits) {
    StoreSums<kGroups>(sums, kBatchBlocks, lane, [&](int i) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += LowBf16(v[i][j]) + HighBf16(v[i][j]);
      return sum;
    });
    return;
  }
  const float most = LowBf16(RowMagnitude(v));
  // Below, the reciprocal would be infinite; such a chunk counts as zeros. A NaN stays one.
  constexpr float kSmallest = 1e-30f;
  const float inverse = most < kSmallest ? 0.0f : FastReciprocal(most * (1.0f / kDigitLimit));
  // Codes enter as 16 * (q - 8).
  if ((lane & 3) == 0) {
    reinterpret_cast<float*>(shared + args.shared.scales_offset)[slot + (lane >> 2)] =
        most * (1.0f / (16.0f * kDigitLimit));
  }
  const uint32_t digits = SharedAddress(shared + args.shared.digits_offset) +
                          (chunk * 4 * kBatchBlocks + batch_block) * 512 + lane * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const DigitWords first = ToDigits(v[i][0], v[i][1], inverse);
    const DigitWords second = ToDigits(v[i][2], v[i][3], inverse);
    StoreShared16(digits + i * kBatchBlocks * 512,
                  uint4{first.high, second.high, first.low, second.low});
  }
  if (kZeros) {
    StoreSums<kGroups>(sums, kBatchBlocks, lane, [&](int i) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum += DigitsValue(LowBf16(v[i][j]), inverse) + DigitsValue(HighBf16(v[i][j]), inverse);
      }
      return sum;
    });
  }
}

// Stages the slice's `num_chunks` chunks. All warps of the block share the work; the caller puts a
// block barrier behind it. A warp has the loads of several chunks in flight at once: their latency
// is most of this function's time. `after_loads` is called once, behind the first loads.
template <int kBatchBlocks, int kGroups, bool kZeros, typename AfterLoads>
__device__ __forceinline__ void StageActivations(const KernelArgs& args, const XSource& x,
                                                 int num_chunks, uint8_t* shared, int warp,
                                                 int lane, AfterLoads&& after_loads) {
  // With sums of digits too, a fourth would not fit the registers.
  constexpr int kInFlight = kZeros && UsesDigits(kBatchBlocks) ? 3 : 4;
  const int num_items = num_chunks * kBatchBlocks;
  int first = warp;
#pragma unroll 1
  do {
    uint32_t v[kInFlight][4][4];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int item = first + j * args.num_warps;
      if (item >= num_items) break;
      x.Load(item / kBatchBlocks, item % kBatchBlocks, v[j]);
    }
    if (first == warp) after_loads();
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int item = first + j * args.num_warps;
      if (item >= num_items) break;
      TradeHalves(lane, v[j]);
      StoreXChunk<kBatchBlocks, kGroups, kZeros>(args, v[j], item / kBatchBlocks,
                                                 item % kBatchBlocks, shared, lane);
    }
    first += kInFlight * args.num_warps;
  } while (first < num_items);
}

}  // namespace flashquant::cuda
