// Reading and writing rows of BF16 eight elements at a time, and sums over a block. For the
// memory-bound ops; the fused kernels have their own loads.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace flashquant::cuda {

inline constexpr int kVectorElements = 8;  // BF16 in 16 bytes

// Whether rows of `width` elements at `pointer` can be read in 16-byte vectors.
inline bool IsVectorAligned(const void* pointer, int64_t width) {
  return width % kVectorElements == 0 && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// kWidth elements (8, as one 16-byte access, or 1) to or from FP32.
template <int kWidth>
__device__ __forceinline__ void LoadBf16(const __nv_bfloat16* from, float (&to)[kWidth]) {
  if constexpr (kWidth == kVectorElements) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __uint_as_float(word[i] << 16);
      to[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
  } else {
    to[0] = __bfloat162float(*from);
  }
}

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <int kWidth>
__device__ __forceinline__ void StoreBf16(const float (&from)[kWidth], __nv_bfloat16* to) {
  if constexpr (kWidth == kVectorElements) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(PackBf16(from[0], from[1]), PackBf16(from[2], from[3]),
                   PackBf16(from[4], from[5]), PackBf16(from[6], from[7]));
  } else {
    *to = __float2bfloat16_rn(from[0]);
  }
}

// The sum over the block, in an order that depends on the block's size alone; all threads get it.
// `scratch`: 32 elements of shared memory, free for reuse after the next barrier.
template <typename T>
__device__ __forceinline__ T BlockSum(T value, T* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  T total = 0;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  for (int warp = 0; warp < num_warps; ++warp) total += scratch[warp];
  return total;
}

}  // namespace flashquant::cuda
