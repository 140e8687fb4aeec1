// Brings a block's slice of the activations into shared memory: K-major BF16, 16 bytes (8 batch
// rows) per feature, times 2^kXExponent, so that ldmatrix.trans gives MMA B fragments and one
// outlier's values are one 16-byte row (in the order of XRow). Also sums x over each quantization
// group, for what the sums of codes begin with (dense.cuh).
#pragma once

#include "kernels/cuda/linear_w4a16/codes.cuh"
#include "kernels/cuda/linear_w4a16/kernel_args.h"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

inline constexpr uint32_t kXChunkBytes = kChunkK * 16;

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

__device__ __forceinline__ float SumOf(const uint32_t (&v)[4]) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) sum += LowBf16(v[j]) + HighBf16(v[j]);
  return sum;
}

// `v`: as TradeHalves leaves it; `chunk`: in the slice.
template <int kBatchBlocks, int kGroups>
__device__ __forceinline__ void StoreXChunk(const KernelArgs& args, uint32_t (&v)[4][4], int chunk,
                                            int batch_block, uint8_t* shared, int lane) {
  const uint32_t x = SharedAddress(shared + args.shared.x_offset) +
                     batch_block * args.shared.x_block_pitch + chunk * kXChunkBytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[i][j] = TimesPowerOfTwo(v[i][j], kXExponent);
    StoreTransposedX4(x + i * 512, LaneXRow(lane), lane, v[i]);
  }
  // A lane's C fragment has rows 2t, 2t + 1 twice.
  const int row = lane >> 2;
  float* starts = reinterpret_cast<float*>(shared + args.shared.starts_offset) +
                  (chunk * kGroups * kBatchBlocks + batch_block) * (kStartBytes / 4) + row / 2 * 4 +
                  row % 2;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float sum = SumOf(v[group * 4 / kGroups]);
#pragma unroll
    for (int i = group * 4 / kGroups + 1; i < (group + 1) * 4 / kGroups; ++i) sum += SumOf(v[i]);
    sum = RowSum(sum);
    if ((lane & 3) != 0) continue;
    // -8 for block 0; as much and -8 * 16 for block 1.
    float* at = starts + group * kBatchBlocks * (kStartBytes / 4);
    const float unit = sum * __uint_as_float(0x00010000);  // 2^-133
    at[0] = at[2] = -8.0f * unit;
    at[16] = at[18] = -136.0f * unit;
  }
}

// Stages the slice's `num_chunks` chunks. All warps of the block share the work; the caller puts a
// block barrier behind it. A warp has the loads of several chunks in flight at once: their latency
// is most of this function's time. `after_loads` is called once, behind the first loads.
template <int kBatchBlocks, int kGroups, typename AfterLoads>
__device__ __forceinline__ void StageActivations(const KernelArgs& args, const XSource& x,
                                                 int num_chunks, uint8_t* shared, int warp,
                                                 int lane, AfterLoads&& after_loads) {
  constexpr int kInFlight = 4;
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
      StoreXChunk<kBatchBlocks, kGroups>(args, v[j], item / kBatchBlocks, item % kBatchBlocks,
                                         shared, lane);
      // Mixed by the compiler, the items' intermediate values do not fit the registers.
      asm volatile("" ::: "memory");
    }
    first += kInFlight * args.num_warps;
  } while (first < num_items);
}

}  // namespace flashquant::cuda
