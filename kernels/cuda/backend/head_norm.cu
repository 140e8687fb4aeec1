// RMSNorm of the query and key heads, before they are rotated. One warp a head; the head stays in
// L1 between the sum and the scaling.
#include "kernels/cuda/backend/op_launchers.h"
#include "kernels/cuda/primitives/bf16_rows.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kWarps = 4;

__global__ void HeadNormKernel(__nv_bfloat16* qkv, const float* q_weight, const float* k_weight,
                               float epsilon, int num_heads, int num_kv_heads, int head_dim) {
  BeginDependent();
  const int head = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (head >= num_heads + num_kv_heads) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __nv_bfloat16* x =
      qkv + (static_cast<int64_t>(blockIdx.x) * (num_heads + 2 * num_kv_heads) + head) * head_dim;
  const float* weight = head < num_heads ? q_weight : k_weight;
  float squares = 0.0f;
  for (int i = lane; i < head_dim; i += 32) {
    const float value = __bfloat162float(x[i]);
    squares += value * value;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  }
  const float factor = rsqrtf(squares / static_cast<float>(head_dim) + epsilon);
  for (int i = lane; i < head_dim; i += 32) {
    x[i] = __float2bfloat16_rn(__bfloat162float(x[i]) * factor * weight[i]);
  }
}

}  // namespace

cudaError_t LaunchHeadNorm(const HeadNormParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  const int heads = params.num_heads + params.num_kv_heads;
  const dim3 grid(static_cast<unsigned>(params.num_tokens),
                  static_cast<unsigned>((heads + kWarps - 1) / kWarps));
  return LaunchDependent(
      HeadNormKernel, grid, kWarps * 32, 0, stream, static_cast<__nv_bfloat16*>(params.qkv),
      static_cast<const float*>(params.q_weight), static_cast<const float*>(params.k_weight),
      params.epsilon, params.num_heads, params.num_kv_heads, params.head_dim);
}

}  // namespace flashquant::cuda
