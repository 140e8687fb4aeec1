// Attention of sequences with one query row in the step (decode). 1 to 8 blocks share the keys of
// one row and KV head (work.h), each with a narrow tile (tile.cuh), and join their sums: as a
// cluster through each other's shared memory, or through global memory where there are no clusters
// (decode_join.cuh).
//
// The cache's keys are older than the step but for the row's own, so their loads begin before the
// kernel before this one has ended; the row's own key and value come from qkv, are rotated and put
// into shared memory and the cache here (decode_query.cuh). Source: the split along keys of
// Flash-Decoding.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/backend/paged_attention/decode_join.cuh"
#include "kernels/cuda/backend/paged_attention/decode_query.cuh"
#include "kernels/cuda/backend/paged_attention/decode_ring.cuh"
#include "kernels/cuda/backend/paged_attention/kv_type.cuh"
#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/backend/paged_attention/plan.h"
#include "kernels/cuda/backend/paged_attention/tile.cuh"
#include "kernels/cuda/primitives/cluster.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

// Grid: (ranks, tiles of all KV heads, sequences). Registers leave room for as many blocks on an SM
// as shared memory does with heads of 128 dimensions.
template <int kPaddedDim, TileKind kKind, bool kVector, bool kCluster, typename Kv>
__global__ void __launch_bounds__(AttentionTile<kPaddedDim, kKind, Kv>::kThreads,
                                  kKind == TileKind::kNarrow ? 3 : 1)
    DecodeAttentionKernel(DecodeAttentionParams decode) {
  using Tile = AttentionTile<kPaddedDim, kKind, Kv>;
  using Element = typename Kv::Element;
  extern __shared__ uint4 shared[];
  __shared__ uint64_t exchange_barrier;
  const PagedAttentionParams& params = decode.attention;
  const DecodeBlock block(params);  // arrays uploaded before the step
  const int warp = static_cast<int>(threadIdx.x) / 32;
  auto* query = reinterpret_cast<uint16_t*>(shared);
  uint8_t* stages = reinterpret_cast<uint8_t*>(shared) + Tile::kQueryBytes;
  auto* exchange = reinterpret_cast<float*>(stages + Tile::kWarps * Tile::kWarpBytes);
  uint8_t* warp_stages = stages + warp * Tile::kWarpBytes;
  if (params.head_dim != kPaddedDim) {  // dimensions beyond D stay zero
    for (int i = threadIdx.x % 32; i < Tile::kWarpBytes / 16; i += 32) {
      reinterpret_cast<uint4*>(warp_stages)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
  }
  if (block.context == 0) {
    BeginDependent();
    return;
  }
  const bool joins_cluster = kCluster && decode.split.ranks > 1;
  if (joins_cluster) {
    BeginExchange(decode, block, kPaddedDim, SharedAddress(&exchange_barrier));
    ClusterArrive();
  }

  const DecodeSteps<Tile::kKeys> steps{decode.split.ranks};
  const bool fused = decode.cos_sin != nullptr;
  const int own_key = fused ? block.context - 1 : block.context;
  const WarpKeyRing<Tile, kPaddedDim, kVector> ring(params, block.first_block, own_key,
                                                    block.kv_head, warp_stages);
  const int first_seen =
      params.sliding_window > 0 ? max(0, block.context - params.sliding_window) : 0;
  // Not fused, the kernel before this one writes the row's own key.
  if (!fused) BeginDependent();
  const int warp_key = warp * Tile::kWarpKeys;
  const int first_key = steps.First(block.rank, first_seen);
  int ahead = first_key;
  int found = ring.Find(ahead + warp_key);
  const RotationRow<kPaddedDim> rotation(decode.cos_sin, own_key, params.head_dim);
  const auto fill = [&](int stage) {
    const int next = ring.Find(steps.Next(ahead) + warp_key);  // a turn before it is needed
    if (ahead < block.context) {
      ring.Start(found, ahead + warp_key, stage);
    } else {
      ring.StartNothing();
    }
    found = next;
    ahead = steps.Next(ahead);
  };
  fill(0);

  // Without the query nothing can be done with the keys, and its loads wait behind the copies that
  // were asked for before.
  if (fused) BeginDependent();
  const int64_t width =
      static_cast<int64_t>(params.num_heads + 2 * params.num_kv_heads) * params.head_dim;
  const __nv_bfloat16* qkv_row =
      static_cast<const __nv_bfloat16*>(params.qkv) + block.token * width;
  const __nv_bfloat16* heads = qkv_row + block.first_head * params.head_dim;
  HeadPairs<kPaddedDim> first_head = {};
  if (warp < block.num_heads) first_head.Load(heads + warp * params.head_dim, params.head_dim);
  OwnKey<Tile, kPaddedDim> own;
  const bool has_own = fused && steps.RankOf(own_key) == block.rank &&
                       own_key % Tile::kKeys / Tile::kWarpKeys == warp;
  if (has_own) own.Load(params, block, qkv_row);
#pragma unroll 1
  for (int stage = 1; stage < Tile::kStages; ++stage) fill(stage);
  StoreDecodeQuery<Tile>(decode, block, heads, rotation, first_head, query);
  if (has_own) {
    own.key.Rotate(rotation);
    if (block.writes_cache) own.WriteToCache(params, block, own_key);
  }
  __syncthreads();

  WarpRows<Tile, kPaddedDim> rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.end[r] = block.context;  // also those beyond the tile's, whose sums nobody reads
    rows.begin[r] = first_seen;
  }
  const float scale_log2 = rows.ScaleLog2(params);
  int stage = 0;
  for (int key = first_key; key < block.context; key = steps.Next(key)) {
    ring.Wait();
    uint8_t* keys = ring.Stage(stage);
    uint8_t* values = keys + Tile::kWarpKeys * Tile::kRowBytes;
    if (has_own && own_key >= key && own_key < key + Tile::kKeys) {
      const int offset = own_key % Tile::kWarpKeys * Tile::kRowBytes;
      own.Store(params, reinterpret_cast<Element*>(keys + offset),
                reinterpret_cast<Element*>(values + offset));
      __syncwarp();
    }
    float scores[Tile::kWarpKeys / 8][4];
    rows.Score(SharedAddress(query), SharedAddress(keys), key + warp_key, scale_log2, scores);
    rows.Rescale(block.num_heads > 8, scores);
    rows.AddValues(SharedAddress(values), scores);
    __syncwarp();
    fill(stage);
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
  }
  rows.ReduceWeight(params.kv_scales);
  auto* sums = reinterpret_cast<float*>(stages);
  if (joins_cluster) {
    JoinInCluster(decode, block, rows, sums, exchange, SharedAddress(&exchange_barrier));
  } else if (kCluster) {
    StoreAlone(decode, block, rows, sums);
  } else {
    LeavePartials(decode, block, rows, sums);
  }
}

inline cudaError_t FindSharedMemoryLimits(SharedMemoryLimits* limits) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto get = [&](cudaDeviceAttr attribute, int* value) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  get(cudaDevAttrMaxSharedMemoryPerMultiprocessor, &limits->of_sm);
  get(cudaDevAttrMaxSharedMemoryPerBlockOptin, &limits->of_block);
  get(cudaDevAttrReservedSharedMemoryPerBlock, &limits->reserved);
  return error;
}

template <int kPaddedDim, TileKind kKind, bool kVector, bool kCluster, typename Kv>
cudaError_t LaunchDecodeKernel(const DecodeAttentionParams& params, cudaStream_t stream) {
  using Tile = AttentionTile<kPaddedDim, kKind, Kv>;
  static_assert(Tile::kSharedBytes == DecodeBlockBytes(kPaddedDim, Tile::kElementBytes,
                                                       kKind == TileKind::kNarrowDouble));
  const auto kernel = DecodeAttentionKernel<kPaddedDim, kKind, kVector, kCluster, Kv>;
  static SharedMemoryLimits limits;  // of the device that the process uses: the first one
  static const cudaError_t kError = [&] {
    const cudaError_t error = FindSharedMemoryLimits(&limits);
    return error != cudaSuccess
               ? error
               : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      limits.of_block - kDecodeStaticBytes);
  }();
  if (kError != cudaSuccess) return kError;
  const PagedAttentionParams& attention = params.attention;
  const int rows = std::min(attention.num_heads / attention.num_kv_heads, kNarrowRows);
  const DecodeSplit& split = params.split;
  const auto ranks = static_cast<unsigned>(split.ranks);
  const dim3 grid(ranks, static_cast<unsigned>(NumDecodeTiles(attention)),
                  static_cast<unsigned>(attention.batch.num_sequences));
  const int exchange =
      kCluster && split.ranks > 1 ? ExchangeBytes(split.ranks, rows, kPaddedDim) : 0;
  const auto bytes = static_cast<size_t>(
      PadSharedBytes(Tile::kSharedBytes + exchange, split.blocks_per_sm, limits));
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

template <int kPaddedDim, bool kVector, typename Kv>
cudaError_t LaunchDecodeOfKind(const DecodeAttentionParams& params, cudaStream_t stream) {
  constexpr TileKind kNarrow = TileKind::kNarrow;
  if (params.partial_sums != nullptr) {
    return LaunchDecodeKernel<kPaddedDim, kNarrow, kVector, false, Kv>(params, stream);
  }
  if constexpr (kVector) {
    if (params.split.double_blocks) {
      return LaunchDecodeKernel<kPaddedDim, TileKind::kNarrowDouble, true, true, Kv>(params,
                                                                                     stream);
    }
  }
  return LaunchDecodeKernel<kPaddedDim, kNarrow, kVector, true, Kv>(params, stream);
}

template <int kPaddedDim>
cudaError_t LaunchDecodeOfDim(const DecodeAttentionParams& params, cudaStream_t stream) {
  if (params.fp8_cache) return LaunchDecodeOfKind<kPaddedDim, true, Fp8Kv>(params, stream);
  return params.attention.head_dim % 8 == 0
             ? LaunchDecodeOfKind<kPaddedDim, true, Bf16Kv>(params, stream)
             : LaunchDecodeOfKind<kPaddedDim, false, Bf16Kv>(params, stream);
}

}  // namespace flashquant::cuda
