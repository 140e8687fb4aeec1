// Attention of sequences with several query rows in the step: wide tiles (tile.cuh), one a block.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/key_loader.cuh"
#include "kernels/cuda/backend/paged_attention/kv_type.cuh"
#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/backend/paged_attention/tile.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

// Where a virtual row of a tile is: its query row in the step and its head.
struct RowPlace {
  int64_t token = 0;
  int head = 0;
  __device__ RowPlace(const PagedAttentionParams& params, const AttentionItem& item, int row,
                      int kv_head) {
    const int group = params.num_heads / params.num_kv_heads;
    token = item.first_token + (item.first_row + row) / group;
    head = kv_head * group + (item.first_row + row) % group;
  }
  __device__ __nv_bfloat16* Output(const PagedAttentionParams& params) const {
    return static_cast<__nv_bfloat16*>(params.out) +
           (token * params.num_heads + head) * params.head_dim;
  }
};

template <typename Tile>
__device__ void LoadQueries(const PagedAttentionParams& params, const AttentionItem& item,
                            int kv_head, uint16_t* query) {
  const int d = params.head_dim;
  const int64_t width = static_cast<int64_t>(params.num_heads + 2 * params.num_kv_heads) * d;
  for (int row = threadIdx.x / 32; row < item.num_rows; row += Tile::kWarps) {
    const RowPlace place(params, item, row, kv_head);
    const __nv_bfloat16* from =
        static_cast<const __nv_bfloat16*>(params.qkv) + place.token * width + place.head * d;
    for (int i = threadIdx.x % 32; i < d; i += 32) {
      query[row * Tile::kStride + Tile::Kv::QueryPlace(i)] = Tile::Kv::QueryBits(from[i]);
    }
  }
}

// Writes a wide tile's rows, two a lane.
template <typename Tile, int kPaddedDim>
__device__ void StoreWide(const PagedAttentionParams& params, const AttentionItem& item,
                          int kv_head, const WarpRows<Tile, kPaddedDim>& rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = threadIdx.x / 32 * 16 + r * 8 + lane / 4;
    if (row >= item.num_rows) continue;
    __nv_bfloat16* out = RowPlace(params, item, row, kv_head).Output(params);
#pragma unroll
    for (int pair = 0; pair < kPaddedDim / 8; ++pair) {
      const int i = Tile::Kv::DimOf(pair, lane);
      if (i >= params.head_dim) continue;
      const float2 sums = Tile::Kv::SumPair(rows.sums, pair, r);
      *reinterpret_cast<__nv_bfloat162*>(out + i) =
          __floats2bfloat162_rn(sums.x / rows.weight[r], sums.y / rows.weight[r]);
    }
  }
}

// Grid: (items, KV heads).
template <int kPaddedDim, bool kVector, typename Kv>
__global__ void __launch_bounds__(AttentionTile<kPaddedDim, TileKind::kWide, Kv>::kThreads)
    AttentionTileKernel(PagedAttentionParams params, const AttentionItem* items) {
  using Tile = AttentionTile<kPaddedDim, TileKind::kWide, Kv>;
  extern __shared__ uint4 shared[];
  const AttentionItem item = items[blockIdx.x];  // uploaded before the step
  const int kv_head = blockIdx.y;
  auto* query = reinterpret_cast<uint16_t*>(shared);
  uint8_t* stages = reinterpret_cast<uint8_t*>(shared) + Tile::kQueryBytes;

  // Dimensions beyond D and rows beyond the tile's stay zero.
  const int zero_bytes = params.head_dim == kPaddedDim ? Tile::kQueryBytes : Tile::kSharedBytes;
  for (int i = threadIdx.x; i < zero_bytes / 16; i += Tile::kThreads) {
    shared[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  BeginDependent();
  const KeyLoader<Tile, kPaddedDim> loader(params, item.first_block, item.end_key, kv_head, stages);
  auto found = loader.Find(item.first_key + Tile::kKeys);
  loader.template Load<kVector>(item.first_key, 0);
  LoadQueries<Tile>(params, item, kv_head, query);

  WarpRows<Tile, kPaddedDim> rows;
  const int group = params.num_heads / params.num_kv_heads;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + r * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
    if (row >= item.num_rows) continue;
    rows.end[r] = item.first_position + (item.first_row + row) / group + 1;
    rows.begin[r] = params.sliding_window > 0 ? max(0, rows.end[r] - params.sliding_window) : 0;
  }
  const bool has_upper = item.num_rows > warp_row + 8;
  const float scale_log2 = rows.ScaleLog2(params);

  int stage = 0;
  for (int key = item.first_key; key < item.end_key; key += Tile::kKeys) {
    if (key + Tile::kKeys < item.end_key) {
      const auto next = loader.Find(key + 2 * Tile::kKeys);  // a turn before it is needed
      loader.template Copy<kVector>(found, key + Tile::kKeys, 1 - stage);
      found = next;
      WaitForCopiesAllBut<1>();
    } else {
      WaitForCopiesAllBut<0>();
    }
    __syncthreads();
    const uint8_t* keys = stages + stage * 2 * Tile::kStageBytes;
    float scores[Tile::kWarpKeys / 8][4];
    rows.Score(SharedAddress(query + warp_row * Tile::kStride), SharedAddress(keys), key,
               scale_log2, scores);
    rows.Rescale(has_upper, scores);
    rows.AddValues(SharedAddress(keys + Tile::kStageBytes), scores);
    __syncthreads();
    stage = 1 - stage;
  }
  rows.ReduceWeight(params.kv_scales);
  StoreWide(params, item, kv_head, rows);
}

template <int kPaddedDim, bool kVector, typename Kv>
cudaError_t LaunchTileKernel(const PagedAttentionParams& params, const AttentionWork& work,
                             cudaStream_t stream) {
  using Tile = AttentionTile<kPaddedDim, TileKind::kWide, Kv>;
  const auto kernel = AttentionTileKernel<kPaddedDim, kVector, Kv>;
  static const cudaError_t kAttributeError =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (kAttributeError != cudaSuccess) return kAttributeError;
  const dim3 grid(static_cast<unsigned>(work.num_wide), static_cast<unsigned>(params.num_kv_heads));
  return LaunchDependent(kernel, grid, Tile::kThreads, Tile::kSharedBytes, stream, params,
                         work.wide);
}

template <int kPaddedDim>
cudaError_t LaunchTilesOfDim(const PagedAttentionParams& params, const AttentionWork& work,
                             cudaStream_t stream) {
  if (work.fp8_cache) return LaunchTileKernel<kPaddedDim, true, Fp8Kv>(params, work, stream);
  return params.head_dim % 8 == 0
             ? LaunchTileKernel<kPaddedDim, true, Bf16Kv>(params, work, stream)
             : LaunchTileKernel<kPaddedDim, false, Bf16Kv>(params, work, stream);
}

}  // namespace flashquant::cuda
