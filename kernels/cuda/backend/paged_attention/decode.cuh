// Attention of sequences with one query row in the step (decode). 1 to 8 blocks share the keys of
// one row and KV head (work.h), each with a narrow tile (tile.cuh), and join their sums: as a
// cluster through each other's shared memory, or through global memory where there are no clusters.
//
// The cache's keys are older than the step but for the row's own, so their loads begin before the
// kernel before this one has ended; the row's own key and value come from qkv, are rotated and put
// into shared memory and the cache here. Source: the split along keys of Flash-Decoding.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/backend/paged_attention/decode_join.cuh"
#include "kernels/cuda/backend/paged_attention/key_loader.cuh"
#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/backend/paged_attention/tile.cuh"
#include "kernels/cuda/backend/rotary.cuh"
#include "kernels/cuda/primitives/cluster.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/kv_row.cuh"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

template <typename Tile>
__device__ void LoadDecodeQuery(const DecodeAttentionParams& params, const DecodeBlock& block,
                                const __nv_bfloat16* qkv_row, const float* cos_sin,
                                __nv_bfloat16* query) {
  const int d = params.attention.head_dim;
  const int half = d / 2;
  for (int row = threadIdx.x / 32; row < block.num_heads; row += Tile::kWarps) {
    const __nv_bfloat16* from = qkv_row + (block.first_head + row) * d;
    __nv_bfloat16* to = query + row * Tile::kStride;
    for (int i = threadIdx.x % 32; i < half; i += 32) {
      RotatedPair pair = {from[i], from[half + i]};
      if (params.cos_sin != nullptr) {
        pair = Rotate(pair.low, pair.high, cos_sin[i], cos_sin[half + i]);
      }
      to[i] = pair.low;
      to[half + i] = pair.high;
    }
  }
}

// The row's own key and value, held by the threads that store them.
template <typename Tile, int kPaddedDim>
class OwnKey {
 public:
  __device__ void Load(const DecodeAttentionParams& params, const DecodeBlock& block,
                       const __nv_bfloat16* qkv_row, const float* cos_sin) {
    const int d = params.attention.head_dim;
    const int half = d / 2;
    const __nv_bfloat16* key = qkv_row + (params.attention.num_heads + block.kv_head) * d;
    const __nv_bfloat16* value = key + params.attention.num_kv_heads * d;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = threadIdx.x + j * Tile::kThreads;
      if (i < half) key_[j] = Rotate(key[i], key[half + i], cos_sin[i], cos_sin[half + i]);
    }
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const int i = threadIdx.x + j * Tile::kThreads;
      if (i < d) value_[j] = value[i];
    }
  }

  __device__ void Store(int head_dim, __nv_bfloat16* key, __nv_bfloat16* value) const {
    const int half = head_dim / 2;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = threadIdx.x + j * Tile::kThreads;
      if (i >= half) continue;
      key[i] = key_[j].low;
      key[half + i] = key_[j].high;
    }
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const int i = threadIdx.x + j * Tile::kThreads;
      if (i < head_dim) value[i] = value_[j];
    }
  }

 private:
  static constexpr int kPairs = (kPaddedDim / 2 + Tile::kThreads - 1) / Tile::kThreads;
  static constexpr int kValues = (kPaddedDim + Tile::kThreads - 1) / Tile::kThreads;
  RotatedPair key_[kPairs] = {};
  __nv_bfloat16 value_[kValues] = {};
};

// Grid: (ranks, tiles of all KV heads, sequences).
template <int kPaddedDim, bool kVector, bool kCluster>
__global__ void __launch_bounds__(AttentionTile<kPaddedDim, false>::kThreads)
    DecodeAttentionKernel(DecodeAttentionParams decode) {
  using Tile = AttentionTile<kPaddedDim, false>;
  extern __shared__ uint4 shared[];
  __shared__ float rotation[kPaddedDim];
  const PagedAttentionParams& params = decode.attention;
  const DecodeBlock block(params);  // arrays uploaded before the step
  if (block.context == 0) {
    BeginDependent();
    return;
  }
  const bool joins_cluster = kCluster && decode.ranks > 1;
  if (joins_cluster) ClusterArrive();
  auto* query = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* stages = query + Tile::kQueryElements;
  auto* exchange = reinterpret_cast<float*>(stages + 4 * Tile::kStageElements);
  const int zero_bytes =
      params.head_dim == kPaddedDim ? 2 * Tile::kQueryElements : Tile::kSharedBytes;
  for (int i = threadIdx.x; i < zero_bytes / 16; i += Tile::kThreads) {
    shared[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  const DecodeSteps<Tile::kKeys> steps{decode.ranks};
  const bool fused = decode.cos_sin != nullptr;
  const int own_key = fused ? block.context - 1 : block.context;
  const KeyLoader<Tile, kPaddedDim> loader(params, block.first_block, own_key, block.kv_head,
                                           stages);
  const int first_seen =
      params.sliding_window > 0 ? max(0, block.context - params.sliding_window) : 0;
  const auto load = [&](int key, int stage) {
    if (key < block.context) {
      loader.template Load<kVector>(key, stage);
    } else {
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
  };
  const int first_key = steps.First(block.rank, first_seen);
  load(first_key, 0);
  load(steps.Next(first_key), 1);
  if (fused) {
    const float* cos_sin = decode.cos_sin + static_cast<int64_t>(own_key) * params.head_dim;
    for (int i = threadIdx.x; i < params.head_dim; i += Tile::kThreads) rotation[i] = cos_sin[i];
  }
  __syncthreads();

  BeginDependent();
  const int64_t width =
      static_cast<int64_t>(params.num_heads + 2 * params.num_kv_heads) * params.head_dim;
  const __nv_bfloat16* qkv_row =
      static_cast<const __nv_bfloat16*>(params.qkv) + block.token * width;
  LoadDecodeQuery<Tile>(decode, block, qkv_row, rotation, query);
  OwnKey<Tile, kPaddedDim> own;
  const bool has_own = fused && steps.RankOf(own_key) == block.rank;
  if (has_own) {
    own.Load(decode, block, qkv_row, rotation);
    if (block.writes_cache) {
      const int in_block = own_key % params.kv.block_tokens;
      const int64_t row = KvRowOffset(
          params.kv, params.batch.block_ids[block.first_block + own_key / params.kv.block_tokens],
          block.kv_head, in_block);
      own.Store(params.head_dim,
                static_cast<__nv_bfloat16*>(const_cast<void*>(params.k_cache)) + row,
                static_cast<__nv_bfloat16*>(const_cast<void*>(params.v_cache)) + row);
    }
  }

  WarpRows<Tile, kPaddedDim> rows;
  const int warp_key = static_cast<int>(threadIdx.x) / 32 * Tile::kWarpKeys;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r * 8 + static_cast<int>(threadIdx.x) % 32 / 4 >= block.num_heads) continue;
    rows.end[r] = block.context;
    rows.begin[r] = first_seen;
  }
  const float scale_log2 = params.softmax_scale * 1.44269504088896341f;
  int stage = 0;
  for (int key = first_key; key < block.context; key = steps.Next(key)) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    __nv_bfloat16* keys = stages + stage * 2 * Tile::kStageElements;
    if (has_own && own_key >= key && own_key < key + Tile::kKeys) {
      __nv_bfloat16* place = keys + (own_key - key) * Tile::kStride;
      own.Store(params.head_dim, place, place + Tile::kStageElements);
      __syncthreads();
    }
    const __nv_bfloat16* warp_keys = keys + warp_key * Tile::kStride;
    float scores[Tile::kWarpKeys / 8][4];
    rows.Score(SharedAddress(query), SharedAddress(warp_keys), key + warp_key, scale_log2, scores);
    rows.Rescale(block.num_heads > 8, scores);
    rows.AddValues(SharedAddress(warp_keys + Tile::kStageElements), scores);
    __syncthreads();
    load(steps.Next(steps.Next(key)), stage);
    stage = 1 - stage;
  }
  rows.ReduceWeight();
  auto* warp_sums = reinterpret_cast<float*>(stages);
  if (joins_cluster) {
    JoinInCluster(decode, block, rows, warp_sums, exchange);
  } else if (kCluster) {
    StoreAlone(decode, block, rows, warp_sums);
  } else {
    LeavePartials(decode, block, rows, warp_sums);
  }
}

template <int kPaddedDim, bool kVector, bool kCluster>
cudaError_t LaunchDecodeKernel(const DecodeAttentionParams& params, cudaStream_t stream) {
  using Tile = AttentionTile<kPaddedDim, false>;
  const auto kernel = DecodeAttentionKernel<kPaddedDim, kVector, kCluster>;
  const auto shared_bytes = [](int ranks, int rows) {
    const int exchange = ranks * ExchangePartFloats(rows, kPaddedDim / ranks);
    return Tile::kSharedBytes + (kCluster && ranks > 1 ? 4 * exchange : 0);
  };
  static const cudaError_t kAttributeError =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           shared_bytes(kMaxDecodeRanks, kNarrowRows));
  if (kAttributeError != cudaSuccess) return kAttributeError;
  const PagedAttentionParams& attention = params.attention;
  const int group = attention.num_heads / attention.num_kv_heads;
  const auto ranks = static_cast<unsigned>(params.ranks);
  const dim3 grid(ranks, static_cast<unsigned>(NumDecodeTiles(attention)),
                  static_cast<unsigned>(attention.batch.num_sequences));
  const auto bytes = static_cast<size_t>(shared_bytes(params.ranks, std::min(group, kNarrowRows)));
  if constexpr (!kCluster) {
    return LaunchDependent(kernel, grid, Tile::kThreads, bytes, stream, params);
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {ranks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <int kPaddedDim>
cudaError_t LaunchDecodeOfDim(const DecodeAttentionParams& params, cudaStream_t stream) {
  const bool vectors = params.attention.head_dim % 8 == 0;
  if (params.partial_sums == nullptr) {
    return vectors ? LaunchDecodeKernel<kPaddedDim, true, true>(params, stream)
                   : LaunchDecodeKernel<kPaddedDim, false, true>(params, stream);
  }
  return vectors ? LaunchDecodeKernel<kPaddedDim, true, false>(params, stream)
                 : LaunchDecodeKernel<kPaddedDim, false, false>(params, stream);
}

}  // namespace flashquant::cuda
