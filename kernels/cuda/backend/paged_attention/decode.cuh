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
#include "kernels/cuda/backend/paged_attention/kv_type.cuh"
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
                                uint16_t* query) {
  const int d = params.attention.head_dim;
  const int half = d / 2;
  for (int row = threadIdx.x / 32; row < block.num_heads; row += Tile::kWarps) {
    const __nv_bfloat16* from = qkv_row + (block.first_head + row) * d;
    uint16_t* to = query + row * Tile::kStride;
    for (int i = threadIdx.x % 32; i < half; i += 32) {
      RotatedPair pair = {from[i], from[half + i]};
      if (params.cos_sin != nullptr) {
        pair = Rotate(pair.low, pair.high, cos_sin[i], cos_sin[half + i]);
      }
      to[Tile::Kv::QueryPlace(i)] = Tile::Kv::QueryBits(pair.low);
      to[Tile::Kv::QueryPlace(half + i)] = Tile::Kv::QueryBits(pair.high);
    }
  }
}

// A position's cosines and sines, on their way in registers while the keys' loads are queued.
template <typename Tile, int kPaddedDim>
class RotationRow {
 public:
  __device__ void Load(const float* cos_sin, int position, int head_dim) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const int i = threadIdx.x + j * Tile::kThreads;
      if (i < head_dim) value_[j] = cos_sin[static_cast<int64_t>(position) * head_dim + i];
    }
  }
  __device__ void Store(float* rotation) const {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const int i = threadIdx.x + j * Tile::kThreads;
      if (i < kPaddedDim) rotation[i] = value_[j];
    }
  }

 private:
  static constexpr int kValues = (kPaddedDim + Tile::kThreads - 1) / Tile::kThreads;
  float value_[kValues] = {};
};

// The row's own key and value as the cache has them, held by the threads that store them.
template <typename Tile, int kPaddedDim>
class OwnKey {
  using Kv = typename Tile::Kv;
  using Element = typename Kv::Element;

 public:
  __device__ void Load(const DecodeAttentionParams& params, const DecodeBlock& block,
                       const __nv_bfloat16* qkv_row, const float* cos_sin) {
    const int d = params.attention.head_dim;
    const int half = d / 2;
    const __nv_bfloat16* key = qkv_row + (params.attention.num_heads + block.kv_head) * d;
    const __nv_bfloat16* value = key + params.attention.num_kv_heads * d;
    const float k_inverse = Kv::kScaled ? 1.0f / params.attention.kv_scales.k : 1.0f;
    const float v_inverse = Kv::kScaled ? 1.0f / params.attention.kv_scales.v : 1.0f;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = threadIdx.x + j * Tile::kThreads;
      if (i >= half) continue;
      const RotatedPair pair = Rotate(key[i], key[half + i], cos_sin[i], cos_sin[half + i]);
      key_[j][0] = Kv::FromBf16(pair.low, k_inverse);
      key_[j][1] = Kv::FromBf16(pair.high, k_inverse);
    }
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const int i = threadIdx.x + j * Tile::kThreads;
      if (i < d) value_[j] = Kv::FromBf16(value[i], v_inverse);
    }
  }

  __device__ void Store(int head_dim, Element* key, Element* value) const {
    const int half = head_dim / 2;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = threadIdx.x + j * Tile::kThreads;
      if (i >= half) continue;
      key[i] = key_[j][0];
      key[half + i] = key_[j][1];
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
  Element key_[kPairs][2] = {};
  Element value_[kValues] = {};
};

// Grid: (ranks, tiles of all KV heads, sequences).
template <int kPaddedDim, bool kVector, bool kCluster, typename Kv>
__global__ void __launch_bounds__(AttentionTile<kPaddedDim, false, Kv>::kThreads)
    DecodeAttentionKernel(DecodeAttentionParams decode) {
  using Tile = AttentionTile<kPaddedDim, false, Kv>;
  using Element = typename Kv::Element;
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
  auto* query = reinterpret_cast<uint16_t*>(shared);
  uint8_t* stages = reinterpret_cast<uint8_t*>(shared) + Tile::kQueryBytes;
  auto* exchange = reinterpret_cast<float*>(stages + Tile::kStages * 2 * Tile::kStageBytes);
  const int zero_bytes = params.head_dim == kPaddedDim ? Tile::kQueryBytes : Tile::kSharedBytes;
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
  const auto copy = [&](const auto& found, int key, int stage) {
    if (key < block.context) {
      loader.template Copy<kVector>(found, key, stage);
    } else {
      CommitCopies();
    }
  };
  RotationRow<Tile, kPaddedDim> own_rotation;
  if (fused) own_rotation.Load(decode.cos_sin, own_key, params.head_dim);
  // Not fused, the kernel before this one writes the row's own key.
  if (!fused) BeginDependent();
  const int first_key = steps.First(block.rank, first_seen);
  int ahead = first_key;
  auto found = loader.Find(ahead);
#pragma unroll
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    const auto next = loader.Find(steps.Next(ahead));
    copy(found, ahead, stage);
    found = next;
    ahead = steps.Next(ahead);
  }
  own_rotation.Store(rotation);
  __syncthreads();

  if (fused) BeginDependent();
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
      own.Store(params.head_dim, static_cast<Element*>(const_cast<void*>(params.k_cache)) + row,
                static_cast<Element*>(const_cast<void*>(params.v_cache)) + row);
    }
  }

  WarpRows<Tile, kPaddedDim> rows;
  const int warp_key = static_cast<int>(threadIdx.x) / 32 * Tile::kWarpKeys;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.end[r] = block.context;  // also those beyond the tile's, whose sums nobody reads
    rows.begin[r] = first_seen;
  }
  const float scale_log2 = rows.ScaleLog2(params);
  int stage = 0;
  for (int key = first_key; key < block.context; key = steps.Next(key)) {
    const auto next = loader.Find(steps.Next(ahead));  // a turn before it is needed
    WaitForCopiesAllBut<Tile::kStages - 1>();
    __syncthreads();
    uint8_t* keys = stages + stage * 2 * Tile::kStageBytes;
    if (has_own && own_key >= key && own_key < key + Tile::kKeys) {
      uint8_t* place = keys + (own_key - key) * Tile::kRowBytes;
      own.Store(params.head_dim, reinterpret_cast<Element*>(place),
                reinterpret_cast<Element*>(place + Tile::kStageBytes));
      __syncthreads();
    }
    const uint8_t* warp_keys = keys + warp_key * Tile::kRowBytes;
    float scores[Tile::kWarpKeys / 8][4];
    rows.Score(SharedAddress(query), SharedAddress(warp_keys), key + warp_key, scale_log2, scores);
    rows.Rescale(block.num_heads > 8, scores);
    rows.AddValues(SharedAddress(warp_keys + Tile::kStageBytes), scores);
    __syncthreads();
    copy(found, ahead, stage);
    found = next;
    ahead = steps.Next(ahead);
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
  }
  rows.ReduceWeight(params.kv_scales);
  auto* warp_sums = reinterpret_cast<float*>(stages);
  if (joins_cluster) {
    JoinInCluster(decode, block, rows, warp_sums, exchange);
  } else if (kCluster) {
    StoreAlone(decode, block, rows, warp_sums);
  } else {
    LeavePartials(decode, block, rows, warp_sums);
  }
}

template <int kPaddedDim, bool kVector, bool kCluster, typename Kv>
cudaError_t LaunchDecodeKernel(const DecodeAttentionParams& params, cudaStream_t stream) {
  using Tile = AttentionTile<kPaddedDim, false, Kv>;
  const auto kernel = DecodeAttentionKernel<kPaddedDim, kVector, kCluster, Kv>;
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
  const bool cluster = params.partial_sums == nullptr;
  if (params.fp8_cache) {
    return cluster ? LaunchDecodeKernel<kPaddedDim, true, true, Fp8Kv>(params, stream)
                   : LaunchDecodeKernel<kPaddedDim, true, false, Fp8Kv>(params, stream);
  }
  if (params.attention.head_dim % 8 == 0) {
    return cluster ? LaunchDecodeKernel<kPaddedDim, true, true, Bf16Kv>(params, stream)
                   : LaunchDecodeKernel<kPaddedDim, true, false, Bf16Kv>(params, stream);
  }
  return cluster ? LaunchDecodeKernel<kPaddedDim, false, true, Bf16Kv>(params, stream)
                 : LaunchDecodeKernel<kPaddedDim, false, false, Bf16Kv>(params, stream);
}

}  // namespace flashquant::cuda
