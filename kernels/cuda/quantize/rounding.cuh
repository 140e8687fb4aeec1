// Rounding to a group's 16 levels and to BF16, as the host does it: the same operations in the same
// order, none of them contracted (these files are built without fused multiply-add where it
// matters, see CMakeLists.txt).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/format/group_params.h"

namespace flashquant::cuda {

// As ToFloat and ToBFloat16 of kernels/base/bfloat16.h.
__device__ __forceinline__ float FloatOf(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
__device__ __forceinline__ BFloat16 RoundToBFloat16(float value) {
  const uint32_t bits = __float_as_uint(value);
  BFloat16 rounded;
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    rounded.bits = static_cast<uint16_t>((bits >> 16) | 0x0040u);
  } else {
    rounded.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
  return rounded;
}
__device__ __forceinline__ bool IsZeroAsBFloat16(float value) {
  return (RoundToBFloat16(value).bits & 0x7fffu) == 0;
}

struct Levels {
  float scale = 0;
  float inverse = 0;
  float zero = 0;
};

__device__ __forceinline__ Levels LevelsOf(GroupParams params) {
  Levels levels;
  levels.scale = FloatOf(params.scale);
  levels.inverse = levels.scale == 0.0f ? 0.0f : __fdiv_rn(1.0f, levels.scale);
  levels.zero = static_cast<float>(params.zero);
  return levels;
}

// The nearest code, as a float; 0 for a value that is not a number.
__device__ __forceinline__ float CodeOf(float value, const Levels& levels) {
  float level = __fadd_rn(__fmul_rn(value, levels.inverse), levels.zero);
  level = level > 0.0f ? level : 0.0f;
  level = level < 15.0f ? level : 15.0f;
  return __fadd_rn(__fadd_rn(level, group_search::kRoundMagic), -group_search::kRoundMagic);
}

__device__ __forceinline__ float ValueOf(float code, const Levels& levels) {
  return __fmul_rn(levels.scale, __fadd_rn(code, -levels.zero));
}

// What an outlier slot holds of `value`: bounded, so that compensation that ran away cannot put an
// infinity into the file.
__device__ __forceinline__ float OutlierOf(float value) {
  const float number = isnan(value) ? 0.0f : value;
  return FloatOf(RoundToBFloat16(fminf(fmaxf(number, -kMaxWeightMagnitude), kMaxWeightMagnitude)));
}

}  // namespace flashquant::cuda
