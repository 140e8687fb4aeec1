// Brings a block's activations into shared memory in the form that both paths read: K-major, 16
// bytes (8 batch rows) per feature, so that ldmatrix.trans gives MMA B fragments and one outlier's
// values are one 16-byte row. Also sums x over each quantization group, which the dense path needs
// to take the bias of its codes out again.
#pragma once

#include "kernels/cuda/linear_w4a16/kernel_args.h"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

inline constexpr uint32_t kXChunkBytes = kChunkK * 16;

// One lane's part of a chunk and batch block: row lane % 8, features (lane / 8) * 8 + 32 i.
// Zero beyond m and k.
__device__ __forceinline__ void LoadXChunk(const KernelArgs& args, int chunk, int batch_block,
                                           int lane, uint4 (&v)[4]) {
  const int row = batch_block * kRowsPerBatchBlock + (lane & 7);
  const int k0 = chunk * kChunkK + (lane >> 3) * 8;
  const __nv_bfloat16* source = args.x + row * args.x_stride + k0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool inside = row < args.m && k0 + 32 * i < args.k;
    v[i] = inside ? __ldg(reinterpret_cast<const uint4*>(source + 32 * i)) : uint4{0, 0, 0, 0};
  }
}

// Transposes through the destination itself: rows as loaded, ldmatrix.trans, K-major words back.
template <int kGroups>
__device__ __forceinline__ void StoreXChunk(const uint4 (&v)[4], uint32_t x_address, float* sums,
                                            int batch_blocks, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) StoreShared16(x_address + 512 * i + 16 * lane, v[i]);
  __syncwarp();
  uint32_t words[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) LdMatrixX4Trans(words[i], x_address + 512 * i + 16 * lane);
  __syncwarp();
  float low = 0.0f;
  float high = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int octet = 0; octet < 4; ++octet) {
      StoreShared4(x_address + 512 * i + 128 * octet + 4 * lane, words[i][octet]);
      low += LowBf16(words[i][octet]);
      high += HighBf16(words[i][octet]);
    }
    if ((i + 1) % (4 / kGroups) != 0) continue;
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      low += __shfl_xor_sync(0xffffffffu, low, distance);
      high += __shfl_xor_sync(0xffffffffu, high, distance);
    }
    const int group = i / (4 / kGroups);
    if (lane < 4) {
      reinterpret_cast<float2*>(sums + group * batch_blocks * kRowsPerBatchBlock)[lane] =
          make_float2(low, high);
    }
    low = 0.0f;
    high = 0.0f;
  }
}

// All warps of the block share the work; the caller puts a block barrier behind it. A warp has the
// loads of several chunks in flight at once: their latency is most of this function's time.
// `after_loads` is called once, behind the first loads.
template <int kBatchBlocks, int kGroups, typename AfterLoads>
__device__ void StageActivations(const KernelArgs& args, const WarpPlan& plan, uint8_t* shared,
                                 int warp, int lane, AfterLoads&& after_loads) {
  constexpr int kInFlight = 3;
  const int num_items = static_cast<int>(plan.x_num_chunks) * kBatchBlocks;
  auto chunk_of = [&](int item) {
    const uint32_t chunk = plan.x_chunk_begin + static_cast<uint32_t>(item) / kBatchBlocks;
    return chunk >= plan.slice_chunks ? chunk - plan.slice_chunks : chunk;
  };
  int first = warp;
#pragma unroll 1
  do {
    uint4 v[kInFlight][4];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int item = first + j * args.num_warps;
      if (item >= num_items) break;
      LoadXChunk(args, plan.slice_chunk + chunk_of(item), item % kBatchBlocks, lane, v[j]);
    }
    if (first == warp) after_loads();
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int item = first + j * args.num_warps;
      if (item >= num_items) break;
      const uint32_t chunk = chunk_of(item);
      const int batch_block = item % kBatchBlocks;
      float* sums = reinterpret_cast<float*>(shared + args.sums_offset) +
                    (chunk * kGroups * kBatchBlocks + batch_block) * kRowsPerBatchBlock;
      const uint32_t x_address = SharedAddress(shared + args.x_offset) +
                                 batch_block * args.x_block_pitch + chunk * kXChunkBytes;
      StoreXChunk<kGroups>(v[j], x_address, sums, kBatchBlocks, lane);
    }
    first += kInFlight * args.num_warps;
  } while (first < num_items);
}

}  // namespace flashquant::cuda
