// Joins the parts of split rows, in key order, and chooses the instance for a head dimension.
#include <cuda_bf16.h>

#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/primitives/dependent_launch.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 256;

// Grid: (joins, KV heads).
__global__ void JoinKernel(PagedAttentionParams params, AttentionWork work) {
  const AttentionJoin join = work.joins[blockIdx.x];  // uploaded before the step
  BeginDependent();
  const int kv_head = blockIdx.y;
  const int d = params.head_dim;
  const int group = params.num_heads / params.num_kv_heads;
  const int64_t part_rows = static_cast<int64_t>(params.num_kv_heads) * kNarrowRows;
  for (int i = threadIdx.x; i < join.num_rows * d; i += kThreads) {
    const int row = i / d;
    const int64_t first = join.first_partial * part_rows + kv_head * kNarrowRows + row;
    float max = -INFINITY;
    for (int part = 0; part < join.num_partials; ++part) {
      max = fmaxf(max, work.partial_weights[(first + part * part_rows) * 2]);
    }
    float sum = 0.0f;
    float weight = 0.0f;
    for (int part = 0; part < join.num_partials; ++part) {
      const int64_t place = first + part * part_rows;
      const float factor = exp2f(work.partial_weights[place * 2] - max);
      weight += factor * work.partial_weights[place * 2 + 1];
      sum += factor * work.partial_sums[place * d + i % d];
    }
    const int64_t head = kv_head * group + join.first_row + row;
    static_cast<__nv_bfloat16*>(
        params.out)[(static_cast<int64_t>(join.token) * params.num_heads + head) * d + i % d] =
        __float2bfloat16_rn(sum / weight);
  }
}

}  // namespace

cudaError_t LaunchAttentionJoins(const PagedAttentionParams& params, const AttentionWork& work,
                                 cudaStream_t stream) {
  if (work.num_joins == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(work.num_joins),
                  static_cast<unsigned>(params.num_kv_heads));
  return LaunchDependent(JoinKernel, grid, kThreads, 0, stream, params, work);
}

cudaError_t LaunchPagedAttention(const PagedAttentionParams& params, const AttentionWork& work,
                                 cudaStream_t stream) {
  if (params.head_dim < 2 || params.head_dim > kMaxHeadDim || params.head_dim % 2 != 0) {
    return cudaErrorInvalidValue;
  }
  cudaError_t error = cudaSuccess;
  switch (PaddedHeadDim(params.head_dim)) {
    case 32:
      error = LaunchAttentionTiles<32>(params, work, stream);
      break;
    case 64:
      error = LaunchAttentionTiles<64>(params, work, stream);
      break;
    case 96:
      error = LaunchAttentionTiles<96>(params, work, stream);
      break;
    case 128:
      error = LaunchAttentionTiles<128>(params, work, stream);
      break;
    default:
      error = LaunchAttentionTiles<256>(params, work, stream);
      break;
  }
  if (error != cudaSuccess) return error;
  return LaunchAttentionJoins(params, work, stream);
}

}  // namespace flashquant::cuda
