// LayerNorm with the residual added before it, learned positions and ReLU: the pointwise ops of
// OPT-style decoders. Plain: one block a row, one element a thread and step.
#include "kernels/cuda/backend/op_launchers.h"
#include "kernels/cuda/primitives/bf16_rows.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void LayerNormKernel(const __nv_bfloat16* x, __nv_bfloat16* residual,
                                const float* weight, const float* bias, float epsilon, int hidden,
                                __nv_bfloat16* out) {
  __shared__ float scratch[32];
  BeginDependent();
  const int64_t row_begin = static_cast<int64_t>(blockIdx.x) * hidden;
  const __nv_bfloat16* source = x + row_begin;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += kThreads) {
    float value = __bfloat162float(source[i]);
    if (residual != nullptr) {
      const __nv_bfloat16 total =
          __float2bfloat16_rn(__bfloat162float(residual[row_begin + i]) + value);
      residual[row_begin + i] = total;
      value = __bfloat162float(total);
    }
    sum += value;
  }
  // Each thread reads back what it wrote itself, so `out` may be `x`.
  if (residual != nullptr) source = residual + row_begin;
  const float mean = BlockSum(sum, scratch) / static_cast<float>(hidden);
  float squares = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += kThreads) {
    const float difference = __bfloat162float(source[i]) - mean;
    squares += difference * difference;
  }
  const float variance = BlockSum(squares, scratch) / static_cast<float>(hidden);
  const float factor = rsqrtf(variance + epsilon);
  for (int i = threadIdx.x; i < hidden; i += kThreads) {
    const float normal = (__bfloat162float(source[i]) - mean) * factor;
    out[row_begin + i] = __float2bfloat16_rn(normal * weight[i] + bias[i]);
  }
}

__global__ void AddPositionsKernel(const int32_t* positions, const float* table, int hidden,
                                   __nv_bfloat16* x) {
  BeginDependent();
  const float* position = table + static_cast<int64_t>(positions[blockIdx.x]) * hidden;
  __nv_bfloat16* row = x + static_cast<int64_t>(blockIdx.x) * hidden;
  for (int i = threadIdx.x; i < hidden; i += kThreads) {
    row[i] = __float2bfloat16_rn(__bfloat162float(row[i]) + position[i]);
  }
}

__global__ void ReluKernel(int64_t count, __nv_bfloat16* x) {
  BeginDependent();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const float value = __bfloat162float(x[i]);
  if (value < 0.0f) x[i] = __float2bfloat16_rn(0.0f);
}

}  // namespace

cudaError_t LaunchLayerNorm(const LayerNormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  return LaunchDependent(
      LayerNormKernel, dim3(static_cast<unsigned>(params.num_rows)), kThreads, 0, stream,
      static_cast<const __nv_bfloat16*>(params.x), static_cast<__nv_bfloat16*>(params.residual),
      static_cast<const float*>(params.weight), static_cast<const float*>(params.bias),
      params.epsilon, params.hidden, static_cast<__nv_bfloat16*>(params.out));
}

cudaError_t LaunchAddPositions(const AddPositionsParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  return LaunchDependent(AddPositionsKernel, dim3(static_cast<unsigned>(params.num_tokens)),
                         kThreads, 0, stream, params.positions, params.table, params.hidden,
                         static_cast<__nv_bfloat16*>(params.x));
}

cudaError_t LaunchRelu(const ReluParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((params.count + kThreads - 1) / kThreads);
  return LaunchDependent(ReluKernel, dim3(blocks), kThreads, 0, stream, params.count,
                         static_cast<__nv_bfloat16*>(params.x));
}

}  // namespace flashquant::cuda
