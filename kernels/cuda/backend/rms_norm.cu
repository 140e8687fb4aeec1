// RMSNorm with the residual added before it. One block a row; the row stays in the block's reach in
// L1 between the sum and the scaling.
#include "kernels/cuda/backend/op_launchers.h"
#include "kernels/cuda/primitives/bf16_rows.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 256;

template <int kWidth>
__global__ void RmsNormKernel(const __nv_bfloat16* x, __nv_bfloat16* residual, const float* weight,
                              float epsilon, int hidden, __nv_bfloat16* out) {
  __shared__ float scratch[32];
  BeginDependent();
  const int64_t row_begin = static_cast<int64_t>(blockIdx.x) * hidden;
  const __nv_bfloat16* source = x + row_begin;
  float sum = 0.0f;
  for (int i = threadIdx.x * kWidth; i < hidden; i += kThreads * kWidth) {
    float value[kWidth];
    LoadBf16<kWidth>(source + i, value);
    if (residual != nullptr) {
      float old[kWidth];
      LoadBf16<kWidth>(residual + row_begin + i, old);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        value[j] = __bfloat162float(__float2bfloat16_rn(old[j] + value[j]));
      }
      StoreBf16<kWidth>(value, residual + row_begin + i);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += value[j] * value[j];
  }
  const float mean = BlockSum(sum, scratch) / static_cast<float>(hidden);
  const float factor = rsqrtf(mean + epsilon);
  // Each thread reads back what it wrote itself, so `out` may be `x`.
  if (residual != nullptr) source = residual + row_begin;
  for (int i = threadIdx.x * kWidth; i < hidden; i += kThreads * kWidth) {
    float value[kWidth];
    LoadBf16<kWidth>(source + i, value);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) value[j] *= factor * weight[i + j];
    StoreBf16<kWidth>(value, out + row_begin + i);
  }
}

}  // namespace

cudaError_t LaunchRmsNorm(const RmsNormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const bool vectors =
      IsVectorAligned(params.x, params.hidden) && IsVectorAligned(params.out, params.hidden) &&
      (params.residual == nullptr || IsVectorAligned(params.residual, params.hidden));
  const auto kernel = vectors ? RmsNormKernel<kVectorElements> : RmsNormKernel<1>;
  return LaunchDependent(kernel, dim3(static_cast<unsigned>(params.num_rows)), kThreads, 0, stream,
                         static_cast<const __nv_bfloat16*>(params.x),
                         static_cast<__nv_bfloat16*>(params.residual),
                         static_cast<const float*>(params.weight), params.epsilon, params.hidden,
                         static_cast<__nv_bfloat16*>(params.out));
}

}  // namespace flashquant::cuda
