// The rotation of a pair of dimensions, written out so that every kernel that rotates gives the
// same bits.
#pragma once

#include <cuda_bf16.h>

namespace flashquant::cuda {

struct RotatedPair {
  __nv_bfloat16 low;
  __nv_bfloat16 high;
};

__device__ __forceinline__ RotatedPair Rotate(__nv_bfloat16 low, __nv_bfloat16 high, float cosine,
                                              float sine) {
  const float a = __bfloat162float(low);
  const float b = __bfloat162float(high);
  return {__float2bfloat16_rn(__fmaf_rn(a, cosine, -__fmul_rn(b, sine))),
          __float2bfloat16_rn(__fmaf_rn(b, cosine, __fmul_rn(a, sine)))};
}

}  // namespace flashquant::cuda
