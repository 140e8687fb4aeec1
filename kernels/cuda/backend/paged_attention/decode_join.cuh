// Who computes what in decode attention (decode.cuh), and how the sums of a row are joined: those
// of a block's warps through its shared memory, those of its blocks as a cluster through each
// other's shared memory, or left in global memory where there are no clusters.
#pragma once

#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/backend/paged_attention/tile.cuh"
#include "kernels/cuda/primitives/cluster.cuh"

namespace flashquant::cuda {

// One block's share of the work.
struct DecodeBlock {
  int rank = 0;
  int kv_head = 0;
  int first_head = 0;  // of the tile, among all query heads
  int num_heads = 0;   // of the tile: its virtual rows
  bool writes_cache = false;
  int sequence = 0;
  int token = 0;
  int first_block = 0;  // in AttentionBatch::block_ids
  int context = 0;      // 0: nothing to do

  __device__ explicit DecodeBlock(const PagedAttentionParams& params) {
    const int group = params.num_heads / params.num_kv_heads;
    const int tile = blockIdx.y / params.num_kv_heads;
    rank = blockIdx.x;
    kv_head = blockIdx.y % params.num_kv_heads;
    first_head = kv_head * group + tile * kNarrowRows;
    num_heads = min(kNarrowRows, group - tile * kNarrowRows);
    writes_cache = tile == 0;
    sequence = blockIdx.z;
    // All at once: one after the other they would be the longest wait before the first copies.
    token = params.batch.query_indptr[sequence];
    const int end_token = params.batch.query_indptr[sequence + 1];
    const int length = params.batch.context_lengths[sequence];
    first_block = params.batch.block_indptr[sequence];
    context = end_token - token == 1 ? length : 0;
  }
};

// A rank's part of what a block joins, one slice of the dimensions: [rows][slice] sums, then [rows]
// greatest scores and [rows] sums of weights.
__host__ __device__ constexpr int ExchangePartFloats(int rows, int slice) {
  return rows * (slice + 2);
}

// Joins the block's warps and hands each sum, its row's greatest score and the row's sum of weights
// to `store`(row, column, sum, max, weight).
// `shared`: room for all warps' sums, free of other use.
template <typename Tile, int kPaddedDim, typename Store>
__device__ void JoinWarps(const WarpRows<Tile, kPaddedDim>& rows, int num_rows, float* shared,
                          const Store& store) {
  const int lane = threadIdx.x % 32;
  const auto sums = [&](int warp, int row) {
    return shared + warp * Tile::kWarpSumFloats + row * (kPaddedDim + 2);
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r * 8 + lane / 4 >= num_rows) continue;
    float* to = sums(threadIdx.x / 32, r * 8 + lane / 4);
#pragma unroll
    for (int pair = 0; pair < kPaddedDim / 8; ++pair) {
      const float2 two = Tile::Kv::SumPair(rows.sums, pair, r);
      to[Tile::Kv::DimOf(pair, lane)] = two.x;
      to[Tile::Kv::DimOf(pair, lane) + 1] = two.y;
    }
    if (lane % 4 == 0) {
      to[kPaddedDim] = rows.max[r];
      to[kPaddedDim + 1] = rows.weight[r];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_rows * kPaddedDim; i += Tile::kThreads) {
    const int row = i / kPaddedDim;
    const int column = i % kPaddedDim;
    float max = -INFINITY;
    for (int warp = 0; warp < Tile::kWarps; ++warp) max = fmaxf(max, sums(warp, row)[kPaddedDim]);
    // Nothing seen by any warp: any base will do, all sums are zero.
    const float base = max == -INFINITY ? 0.0f : max;
    float sum = 0.0f;
    float weight = 0.0f;
    for (int warp = 0; warp < Tile::kWarps; ++warp) {
      const float* from = sums(warp, row);
      const float factor = exp2f(from[kPaddedDim] - base);
      sum += factor * from[column];
      weight += factor * from[kPaddedDim + 1];
    }
    store(row, column, sum, max, weight);
  }
}

// The average over all ranks, in their order. `part`(rank) gives a rank's sum, greatest score and
// weight.
template <typename Part>
__device__ float JoinRanks(int ranks, const Part& part) {
  float max = -INFINITY;
  for (int rank = 0; rank < ranks; ++rank) max = fmaxf(max, part(rank).max);
  float sum = 0.0f;
  float weight = 0.0f;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto one = part(rank);
    const float factor = exp2f(one.max - max);
    sum += factor * one.sum;
    weight += factor * one.weight;
  }
  return sum / weight;
}

struct RankPart {
  float sum;
  float max;
  float weight;
};

__device__ __forceinline__ __nv_bfloat16* DecodeOutput(const PagedAttentionParams& params,
                                                       const DecodeBlock& block, int row) {
  const int64_t head = static_cast<int64_t>(block.token) * params.num_heads + block.first_head;
  return static_cast<__nv_bfloat16*>(params.out) + (head + row) * params.head_dim;
}

// Sends each slice of the sums to the block that joins it, and joins this block's own.
template <typename Tile, int kPaddedDim>
__device__ void JoinInCluster(const DecodeAttentionParams& params, const DecodeBlock& block,
                              const WarpRows<Tile, kPaddedDim>& rows, float* shared,
                              float* exchange) {
#if __CUDA_ARCH__ >= 900
  const int d = params.attention.head_dim;
  const int slice = kPaddedDim / params.ranks;
  const int part_floats = ExchangePartFloats(block.num_heads, slice);
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  ClusterWait();  // all blocks have begun
  JoinWarps(
      rows, block.num_heads, shared, [&](int row, int column, float sum, float max, float weight) {
        float* to = cluster.map_shared_rank(exchange, column / slice) + block.rank * part_floats;
        to[row * slice + column % slice] = sum;
        if (column % slice != 0) return;
        to[block.num_heads * slice + row] = max;
        to[block.num_heads * (slice + 1) + row] = weight;
      });
  cluster.sync();
  for (int i = threadIdx.x; i < block.num_heads * slice; i += Tile::kThreads) {
    const int row = i / slice;
    const int column = block.rank * slice + i % slice;
    if (column >= d) continue;
    const float average = JoinRanks(params.ranks, [&](int rank) {
      const float* part = exchange + rank * part_floats;
      const float* ends = part + block.num_heads * slice;
      return RankPart{part[i], ends[row], ends[block.num_heads + row]};
    });
    DecodeOutput(params.attention, block, row)[column] = __float2bfloat16_rn(average);
  }
#endif
}

// The only rank joins nobody's sums.
template <typename Tile, int kPaddedDim>
__device__ void StoreAlone(const DecodeAttentionParams& params, const DecodeBlock& block,
                           const WarpRows<Tile, kPaddedDim>& rows, float* shared) {
  JoinWarps(rows, block.num_heads, shared,
            [&](int row, int column, float sum, float /*max*/, float weight) {
              if (column >= params.attention.head_dim) return;
              DecodeOutput(params.attention, block, row)[column] =
                  __float2bfloat16_rn(sum / weight);
            });
}

template <typename Tile, int kPaddedDim>
__device__ void LeavePartials(const DecodeAttentionParams& params, const DecodeBlock& block,
                              const WarpRows<Tile, kPaddedDim>& rows, float* shared) {
  const int d = params.attention.head_dim;
  const int64_t place =
      (static_cast<int64_t>(block.sequence) * params.ranks + block.rank) * gridDim.y + blockIdx.y;
  float* sums = params.partial_sums + place * kNarrowRows * d;
  float* weights = params.partial_weights + place * kNarrowRows * 2;
  JoinWarps(rows, block.num_heads, shared,
            [&](int row, int column, float sum, float max, float weight) {
              if (column < d) sums[row * d + column] = sum;
              if (column != 0) return;
              weights[row * 2] = max;
              weights[row * 2 + 1] = weight;
            });
}

}  // namespace flashquant::cuda
