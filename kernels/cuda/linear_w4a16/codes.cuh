// A packed weight's codes and outliers (packed_format.h) as BF16 numbers, for those who dequantise.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "kernels/cuda/linear_w4a16/packed_format.h"
#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {

// BF16 bits of 2^exponent.
FQ_HOST_DEVICE constexpr uint32_t PowerOfTwo(int exponent) {
  return static_cast<uint32_t>(127 + exponent) << 7;
}
inline constexpr uint32_t kOutlierScale = PowerOfTwo(kOutlierExponent);  // from stored to true

__device__ __forceinline__ __nv_bfloat162 AsPair(uint32_t bits) {
  __nv_bfloat162 pair;
  memcpy(&pair, &bits, sizeof(pair));
  return pair;
}

__device__ __forceinline__ uint32_t BitsOf(const __nv_bfloat162& pair) {
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// Both numbers of a word times 2^exponent.
__device__ __forceinline__ uint32_t TimesPowerOfTwo(uint32_t pair, int exponent) {
  return BitsOf(__hmul2(AsPair(pair), AsPair(PowerOfTwo(exponent) * 0x00010001u)));
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
  return BitsOf(__hmul2(__hsub2(AsPair(biased), AsPair(zero)), AsPair(scale)));
}

}  // namespace flashquant::cuda
