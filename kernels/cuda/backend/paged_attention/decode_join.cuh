// Who computes what in decode attention (decode.cuh), and how the sums of a row are joined: those
// of a block's warps through its shared memory, those of its blocks as a cluster through each
// other's shared memory, or left in global memory where there are no clusters.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/backend/paged_attention/tile.cuh"
#include "kernels/cuda/primitives/cluster.cuh"
#include "kernels/cuda/primitives/mbarrier.cuh"
#include "kernels/cuda/primitives/mma.cuh"

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

// Makes the barrier that JoinInCluster waits for, before the cluster's first one. All threads may
// call it.
__device__ __forceinline__ void BeginExchange(const DecodeAttentionParams& params,
                                              const DecodeBlock& block, int padded_dim,
                                              uint32_t barrier) {
  if (threadIdx.x != 0) return;
  InitBarrier(barrier, 1);
  ArriveExpecting(barrier, ExchangeBytes(params.split.ranks, block.num_heads, padded_dim));
  FenceBarrierInit();
}

__device__ __forceinline__ void AddScaled(float factor, const float4& v, float4* sum) {
  sum->x += factor * v.x;
  sum->y += factor * v.y;
  sum->z += factor * v.z;
  sum->w += factor * v.w;
}

__device__ __forceinline__ float4 Average(const float4& sum, float weight) {
  const float inverse = 1.0f / weight;
  return make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
}

// Joins the block's warps and hands each four sums, their row's greatest score and the row's sum of
// weights to `store`(row, first column, sums, max, weight).
// `shared`: the warps' stages, those of all steps free of other use.
template <typename Tile, int kPaddedDim, typename Store>
__device__ void JoinWarps(const WarpRows<Tile, kPaddedDim>& rows, int num_rows, float* shared,
                          const Store& store) {
  const int lane = threadIdx.x % 32;
  const auto sums = [&](int warp, int row) {
    return shared + warp * (Tile::kWarpBytes / 4) + row * Tile::kSumStride;
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r * 8 + lane / 4 >= num_rows) continue;
    float* to = sums(threadIdx.x / 32, r * 8 + lane / 4);
#pragma unroll
    for (int pair = 0; pair < kPaddedDim / 8; ++pair) {
      *reinterpret_cast<float2*>(to + Tile::Kv::DimOf(pair, lane)) =
          Tile::Kv::SumPair(rows.sums, pair, r);
    }
    if (lane % 4 == 0) {
      *reinterpret_cast<float2*>(to + kPaddedDim) = make_float2(rows.max[r], rows.weight[r]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_rows * (kPaddedDim / 4); i += Tile::kThreads) {
    const int row = i / (kPaddedDim / 4);
    const int column = i % (kPaddedDim / 4) * 4;
    float2 ends[Tile::kWarps];
    float max = -INFINITY;
#pragma unroll
    for (int warp = 0; warp < Tile::kWarps; ++warp) {
      ends[warp] = *reinterpret_cast<const float2*>(sums(warp, row) + kPaddedDim);
      max = fmaxf(max, ends[warp].x);
    }
    // Nothing seen by any warp: any base will do, all sums are zero.
    const float base = max == -INFINITY ? 0.0f : max;
    float4 sum = {};
    float weight = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Tile::kWarps; ++warp) {
      const float factor = exp2f(ends[warp].x - base);
      AddScaled(factor, *reinterpret_cast<const float4*>(sums(warp, row) + column), &sum);
      weight += factor * ends[warp].y;
    }
    store(row, column, sum, max, weight);
  }
}

// The average over all ranks, in their order. `part`(rank) gives a rank's sums, greatest score and
// weight.
template <typename Part>
__device__ float4 JoinRanks(int ranks, const Part& part) {
  float max = -INFINITY;
  for (int rank = 0; rank < ranks; ++rank) max = fmaxf(max, part(rank).max);
  float4 sum = {};
  float weight = 0.0f;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto one = part(rank);
    const float factor = exp2f(one.max - max);
    AddScaled(factor, one.sum, &sum);
    weight += factor * one.weight;
  }
  return Average(sum, weight);
}

struct RankPart {
  float4 sum;
  float max;
  float weight;
};

__device__ __forceinline__ __nv_bfloat16* DecodeOutput(const PagedAttentionParams& params,
                                                       const DecodeBlock& block, int row) {
  const int64_t head = static_cast<int64_t>(block.token) * params.num_heads + block.first_head;
  return static_cast<__nv_bfloat16*>(params.out) + (head + row) * params.head_dim;
}

// Writes columns `column` to column + 3 of a row, those that there are.
__device__ __forceinline__ void StoreAverages(const PagedAttentionParams& params,
                                              const DecodeBlock& block, int row, int column,
                                              const float4& v) {
  __nv_bfloat16* out = DecodeOutput(params, block, row) + column;
  const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y);
  const __nv_bfloat162 high = __floats2bfloat162_rn(v.z, v.w);
  // A head has an even number of dimensions.
  if (column < params.head_dim) *reinterpret_cast<__nv_bfloat162*>(out) = low;
  if (column + 2 < params.head_dim) *reinterpret_cast<__nv_bfloat162*>(out + 2) = high;
}

// Sends each slice of the sums to the block that joins it, and joins this block's own. `barrier`:
// BeginExchange's.
template <typename Tile, int kPaddedDim>
__device__ void JoinInCluster(const DecodeAttentionParams& params, const DecodeBlock& block,
                              const WarpRows<Tile, kPaddedDim>& rows, float* shared,
                              float* exchange, uint32_t barrier) {
  const int ranks = params.split.ranks;
  const int slice = kPaddedDim / ranks;
  const int part_floats = ExchangePartFloats(block.num_heads, slice);
  const uint32_t part = SharedAddress(exchange + block.rank * part_floats);
  // Divisions by constants only: others take as long as the sums.
  const auto owner_of = [&](int column) { return column * ranks / kPaddedDim; };
  ClusterWait();  // all blocks have begun
  JoinWarps(rows, block.num_heads, shared,
            [&](int row, int column, const float4& sum, float max, float weight) {
              const int owner = owner_of(column);
              const int in_slice = column - owner * slice;
              const uint32_t to = ClusterAddress(part, owner);
              const uint32_t arrival = ClusterAddress(barrier, owner);
              StoreClusterAsync16(to + 4 * (row * slice + in_slice), sum, arrival);
              if (in_slice != 0) return;
              StoreClusterAsync16(to + 4 * (block.num_heads * slice + 4 * row),
                                  make_float4(max, weight, 0.0f, 0.0f), arrival);
            });
  WaitForPhase(barrier, 0);
  for (int i = threadIdx.x; i < block.num_heads * (kPaddedDim / 4); i += Tile::kThreads) {
    const int row = i / (kPaddedDim / 4);
    const int column = i % (kPaddedDim / 4) * 4;
    if (owner_of(column) != block.rank) continue;
    const float4 averages = JoinRanks(ranks, [&](int rank) {
      const float* from = exchange + rank * part_floats;
      const float* ends = from + block.num_heads * slice + 4 * row;
      return RankPart{
          *reinterpret_cast<const float4*>(from + row * slice + column - block.rank * slice),
          ends[0], ends[1]};
    });
    StoreAverages(params.attention, block, row, column, averages);
  }
}

// The only rank joins nobody's sums.
template <typename Tile, int kPaddedDim>
__device__ void StoreAlone(const DecodeAttentionParams& params, const DecodeBlock& block,
                           const WarpRows<Tile, kPaddedDim>& rows, float* shared) {
  JoinWarps(rows, block.num_heads, shared,
            [&](int row, int column, const float4& sum, float /*max*/, float weight) {
              StoreAverages(params.attention, block, row, column, Average(sum, weight));
            });
}

template <typename Tile, int kPaddedDim>
__device__ void LeavePartials(const DecodeAttentionParams& params, const DecodeBlock& block,
                              const WarpRows<Tile, kPaddedDim>& rows, float* shared) {
  const int d = params.attention.head_dim;
  const int64_t place =
      (static_cast<int64_t>(block.sequence) * params.split.ranks + block.rank) * gridDim.y +
      blockIdx.y;
  float* sums = params.partial_sums + place * kNarrowRows * d;
  float* weights = params.partial_weights + place * kNarrowRows * 2;
  JoinWarps(rows, block.num_heads, shared,
            [&](int row, int column, const float4& sum, float max, float weight) {
              float* to = sums + row * d + column;
              if (column < d) *reinterpret_cast<float2*>(to) = make_float2(sum.x, sum.y);
              if (column + 2 < d) *reinterpret_cast<float2*>(to + 2) = make_float2(sum.z, sum.w);
              if (column != 0) return;
              weights[row * 2] = max;
              weights[row * 2 + 1] = weight;
            });
}

}  // namespace flashquant::cuda
