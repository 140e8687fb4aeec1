// What the parts of the sampling kernel share: one block a row, its shared memory, and sums over
// it.
#pragma once

#include <cstdint>

namespace flashquant::cuda {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 8;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kFixedOne = 0x1p40f;  // weight 1, of the best token, in fixed point

// In dynamic shared memory: too much for the static limit.
struct SamplingShared {
  uint64_t thread_bins[kBins][kThreads];
  uint64_t bins[kBins];
  uint64_t warps[kWarps];
  int32_t id;
};

__device__ inline uint64_t WarpSum(uint64_t value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// Over the block, for all its threads.
__device__ inline uint64_t BlockSum(uint64_t value, SamplingShared& shared) {
  value = WarpSum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (int warp = 0; warp < kWarps; ++warp) value += shared.warps[warp];
  return value;
}

}  // namespace flashquant::cuda
