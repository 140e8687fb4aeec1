// Chooses the instance for a head dimension, and joins the ranks of a decode row where there are no
// clusters.
#include <cuda_bf16.h>

#include "kernels/cuda/backend/paged_attention/decode.cuh"
#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/primitives/dependent_launch.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 256;

// Grid: (1, tiles of all KV heads, sequences), so that a block's place is that of the parts.
__global__ void DecodeJoinKernel(DecodeAttentionParams decode) {
  const PagedAttentionParams& params = decode.attention;
  BeginDependent();
  const DecodeBlock block(params);
  if (block.context == 0) return;
  const int d = params.head_dim;
  for (int i = threadIdx.x; i < block.num_heads * (d / 2); i += kThreads) {
    const int row = i / (d / 2);
    const int column = i % (d / 2) * 2;
    const float4 averages = JoinRanks(decode.split.ranks, [&](int rank) {
      const int64_t place =
          (static_cast<int64_t>(block.sequence) * decode.split.ranks + rank) * gridDim.y +
          blockIdx.y;
      const float2 sums = *reinterpret_cast<const float2*>(
          decode.partial_sums + (place * kNarrowRows + row) * d + column);
      const float* ends = decode.partial_weights + (place * kNarrowRows + row) * 2;
      return RankPart{make_float4(sums.x, sums.y, 0.0f, 0.0f), ends[0], ends[1]};
    });
    *reinterpret_cast<__nv_bfloat162*>(DecodeOutput(params, block, row) + column) =
        __floats2bfloat162_rn(averages.x, averages.y);
  }
}

bool IsHeadDim(int head_dim, bool fp8_cache) {
  return head_dim >= 2 && head_dim <= kMaxHeadDim &&
         head_dim % (fp8_cache ? kFp8DimMultiple : 2) == 0;
}

}  // namespace

int NumDecodeTiles(const PagedAttentionParams& params) {
  const int group = params.num_heads / params.num_kv_heads;
  return (group + kNarrowRows - 1) / kNarrowRows * params.num_kv_heads;
}

int64_t DecodePartialFloats(const PagedAttentionParams& params, int ranks) {
  return int64_t{params.batch.num_sequences} * ranks * NumDecodeTiles(params) * kNarrowRows *
         (params.head_dim + 2);
}

cudaError_t LaunchDecodeAttention(const DecodeAttentionParams& params, cudaStream_t stream) {
  if (!IsHeadDim(params.attention.head_dim, params.fp8_cache)) return cudaErrorInvalidValue;
  const int ranks = params.split.ranks;
  if (ranks < 1 || ranks > kMaxDecodeRanks || (ranks & (ranks - 1)) != 0) {
    return cudaErrorInvalidValue;
  }
  const auto launch = [&] {
    switch (PaddedHeadDim(params.attention.head_dim)) {
      case 32:
        return LaunchDecodeOfDim<32>(params, stream);
      case 64:
        return LaunchDecodeOfDim<64>(params, stream);
      case 96:
        return LaunchDecodeOfDim<96>(params, stream);
      case 128:
        return LaunchDecodeOfDim<128>(params, stream);
      default:
        return LaunchDecodeOfDim<256>(params, stream);
    }
  };
  const cudaError_t error = launch();
  if (error != cudaSuccess || params.partial_sums == nullptr) return error;
  const dim3 grid(1, static_cast<unsigned>(NumDecodeTiles(params.attention)),
                  static_cast<unsigned>(params.attention.batch.num_sequences));
  return LaunchDependent(DecodeJoinKernel, grid, kThreads, 0, stream, params);
}

cudaError_t LaunchAttentionTiles(const PagedAttentionParams& params, const AttentionWork& work,
                                 cudaStream_t stream) {
  if (!IsHeadDim(params.head_dim, work.fp8_cache)) return cudaErrorInvalidValue;
  if (work.num_wide == 0) return cudaSuccess;
  switch (PaddedHeadDim(params.head_dim)) {
    case 32:
      return LaunchTilesOfDim<32>(params, work, stream);
    case 64:
      return LaunchTilesOfDim<64>(params, work, stream);
    case 96:
      return LaunchTilesOfDim<96>(params, work, stream);
    case 128:
      return LaunchTilesOfDim<128>(params, work, stream);
    default:
      return LaunchTilesOfDim<256>(params, work, stream);
  }
}

}  // namespace flashquant::cuda
