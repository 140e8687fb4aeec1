// A packed weight's codes and outliers (packed_format.h) as BF16 numbers, for those who dequantise.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

inline constexpr uint32_t kOutlierScale = (127 + kOutlierExponent) << 7;  // from stored to true

__device__ __forceinline__ __nv_bfloat162 AsPair(uint32_t bits) {
  __nv_bfloat162 pair;
  memcpy(&pair, &bits, sizeof(pair));
  return pair;
}

// One of a word's two halves, twice.
__device__ __forceinline__ uint32_t Twice(uint32_t pair, int half) {
  return __byte_perm(pair, 0, half == 0 ? 0x1010 : 0x3232);
}

// scale * (q - z) of two neighbouring features, rounded once: codes of block r % 2, features
// 2 * (r / 2) and the next of the four in a word. `zero`: 128 + z; both operands twice.
__device__ __forceinline__ uint32_t DequantPair(uint32_t word, int r, uint32_t scale,
                                                uint32_t zero) {
  uint32_t biased;  // 128 + q
  // One instruction for (codes & nibbles) | 128; the compiler alone makes two of it.
  asm("lop3.b32 %0, %1, %2, %3, 0xea;"
      : "=r"(biased)
      : "r"(word >> (4 * r)), "n"(0x000f000f), "r"(0x43004300));
  const __nv_bfloat162 value = __hmul2(__hsub2(AsPair(biased), AsPair(zero)), AsPair(scale));
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace flashquant::cuda
