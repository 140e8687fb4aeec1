// Attention of sequences with one query row in the step (decode). kDecodeRanks blocks share the
// keys of one row and KV head (work.h), each with a narrow tile (tile.cuh), and join their sums: as
// a cluster through each other's shared memory, or through global memory where there are no
// clusters.
//
// The cache's keys are older than the step but for the row's own, so their loads begin before the
// kernel before this one has ended; the row's own key and value come from qkv, are rotated and put
// into shared memory and the cache here. Source: the split along keys of Flash-Decoding.
#pragma once

#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/backend/paged_attention/key_loader.cuh"
#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/backend/paged_attention/tile.cuh"
#include "kernels/cuda/backend/rotary.cuh"
#include "kernels/cuda/primitives/cluster.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/kv_row.cuh"
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
  int context = 0;  // 0: nothing to do

  __device__ explicit DecodeBlock(const PagedAttentionParams& params) {
    const int group = params.num_heads / params.num_kv_heads;
    const int tile = blockIdx.y / params.num_kv_heads;
    rank = blockIdx.x;
    kv_head = blockIdx.y % params.num_kv_heads;
    first_head = kv_head * group + tile * kNarrowRows;
    num_heads = min(kNarrowRows, group - tile * kNarrowRows);
    writes_cache = tile == 0;
    sequence = blockIdx.z;
    token = params.batch.query_indptr[sequence];
    if (params.batch.query_indptr[sequence + 1] - token == 1) {
      context = params.batch.context_lengths[sequence];
    }
  }
};

// Where the ranks' sums meet in a cluster: each block joins one slice of the dimensions. A rank's
// part: [rows][slice] sums, then [rows] greatest scores and [rows] sums of weights.
template <int kPaddedDim>
struct DecodeExchange {
  static constexpr int kSlice = kPaddedDim / kDecodeRanks;
  static __host__ __device__ int PartFloats(int rows) { return rows * (kSlice + 2); }
};

template <typename Tile>
__device__ void LoadDecodeQuery(const DecodeAttentionParams& params, const DecodeBlock& block,
                                const __nv_bfloat16* qkv_row, __nv_bfloat16* query) {
  const int d = params.attention.head_dim;
  const int half = d / 2;
  const float* cos_sin = params.cos_sin + static_cast<int64_t>(block.context - 1) * d;
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
                       const __nv_bfloat16* qkv_row) {
    const int d = params.attention.head_dim;
    const int half = d / 2;
    const float* cos_sin = params.cos_sin + static_cast<int64_t>(block.context - 1) * d;
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

// Joins the block's warps and hands each sum to `store`(row, column, sum), and each row's greatest
// score and weight to `store_row`(row, column, max, weight) in the first column of every slice.
// `shared`: room for all warps' sums, free of other use.
template <typename Tile, int kPaddedDim, typename Store, typename StoreRow>
__device__ void JoinWarps(const WarpRows<Tile, kPaddedDim>& rows, int num_rows, float* shared,
                          const Store& store, const StoreRow& store_row) {
  const int lane = threadIdx.x % 32;
  const auto sums = [&](int warp, int row) {
    return shared + warp * Tile::kWarpSumFloats + row * (kPaddedDim + 2);
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* to = sums(threadIdx.x / 32, r * 8 + lane / 4);
#pragma unroll
    for (int n = 0; n < kPaddedDim / 8; ++n) {
      to[n * 8 + lane % 4 * 2] = rows.sums[n][2 * r];
      to[n * 8 + lane % 4 * 2 + 1] = rows.sums[n][2 * r + 1];
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
    store(row, column, sum);
    if (column % DecodeExchange<kPaddedDim>::kSlice == 0) store_row(row, column, max, weight);
  }
}

// The average over all ranks, in their order. `part`(rank) gives a rank's sum, greatest score and
// weight.
template <typename Part>
__device__ float JoinRanks(const Part& part) {
  float max = -INFINITY;
#pragma unroll
  for (int rank = 0; rank < kDecodeRanks; ++rank) max = fmaxf(max, part(rank).max);
  float sum = 0.0f;
  float weight = 0.0f;
#pragma unroll
  for (int rank = 0; rank < kDecodeRanks; ++rank) {
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

// Sends each slice of the sums to the block that joins it, and joins this block's own.
template <typename Tile, int kPaddedDim>
__device__ void JoinInCluster(const PagedAttentionParams& params, const DecodeBlock& block,
                              const WarpRows<Tile, kPaddedDim>& rows, float* shared,
                              float* exchange) {
#if __CUDA_ARCH__ >= 900
  using Exchange = DecodeExchange<kPaddedDim>;
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const int part_floats = Exchange::PartFloats(block.num_heads);
  const auto mine = [&](int column) {
    return cluster.map_shared_rank(exchange, column / Exchange::kSlice) + block.rank * part_floats;
  };
  ClusterWait();  // all blocks have begun
  JoinWarps(
      rows, block.num_heads, shared,
      [&](int row, int column, float sum) {
        mine(column)[row * Exchange::kSlice + column % Exchange::kSlice] = sum;
      },
      [&](int row, int column, float max, float weight) {
        float* to = mine(column) + block.num_heads * Exchange::kSlice;
        to[row] = max;
        to[block.num_heads + row] = weight;
      });
  cluster.sync();
  for (int i = threadIdx.x; i < block.num_heads * Exchange::kSlice; i += Tile::kThreads) {
    const int row = i / Exchange::kSlice;
    const int column = block.rank * Exchange::kSlice + i % Exchange::kSlice;
    if (column >= params.head_dim) continue;
    const float average = JoinRanks([&](int rank) {
      const float* part = exchange + rank * part_floats;
      const float* ends = part + block.num_heads * Exchange::kSlice;
      return RankPart{part[i], ends[row], ends[block.num_heads + row]};
    });
    const int64_t head = static_cast<int64_t>(block.token) * params.num_heads + block.first_head;
    static_cast<__nv_bfloat16*>(params.out)[(head + row) * params.head_dim + column] =
        __float2bfloat16_rn(average);
  }
#endif
}

template <typename Tile, int kPaddedDim>
__device__ void LeavePartials(const DecodeAttentionParams& params, const DecodeBlock& block,
                              const WarpRows<Tile, kPaddedDim>& rows, float* shared) {
  const int d = params.attention.head_dim;
  const int64_t place =
      (static_cast<int64_t>(block.sequence) * kDecodeRanks + block.rank) * gridDim.y + blockIdx.y;
  float* sums = params.partial_sums + place * kNarrowRows * d;
  float* weights = params.partial_weights + place * kNarrowRows * 2;
  JoinWarps(
      rows, block.num_heads, shared,
      [&](int row, int column, float sum) {
        if (column < d) sums[row * d + column] = sum;
      },
      [&](int row, int column, float max, float weight) {
        if (column != 0) return;
        weights[row * 2] = max;
        weights[row * 2 + 1] = weight;
      });
}

// Grid: (ranks, tiles of all KV heads, sequences).
template <int kPaddedDim, bool kVector, bool kCluster>
__global__ void __launch_bounds__(AttentionTile<kPaddedDim, false>::kThreads)
    DecodeAttentionKernel(DecodeAttentionParams decode) {
  using Tile = AttentionTile<kPaddedDim, false>;
  using Steps = DecodeSteps<Tile::kKeys>;
  extern __shared__ uint4 shared[];
  const PagedAttentionParams& params = decode.attention;
  const DecodeBlock block(params);  // arrays uploaded before the step
  if (block.context == 0) {
    BeginDependent();
    return;
  }
  if constexpr (kCluster) ClusterArrive();
  auto* query = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* stages = query + Tile::kQueryElements;
  auto* exchange = reinterpret_cast<float*>(stages + 4 * Tile::kStageElements);
  const int zero_bytes =
      params.head_dim == kPaddedDim ? 2 * Tile::kQueryElements : Tile::kSharedBytes;
  for (int i = threadIdx.x; i < zero_bytes / 16; i += Tile::kThreads) {
    shared[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  const bool fused = decode.cos_sin != nullptr;
  const int own_key = fused ? block.context - 1 : block.context;
  const int first_block = params.batch.block_indptr[block.sequence];
  const KeyLoader<Tile, kPaddedDim> loader(params, first_block, own_key, block.kv_head, stages);
  const int first_seen =
      params.sliding_window > 0 ? max(0, block.context - params.sliding_window) : 0;
  const auto load = [&](int key, int stage) {
    if (key < block.context) {
      loader.template Load<kVector>(key, stage);
    } else {
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
  };
  const int first_key = Steps::First(block.rank, first_seen);
  load(first_key, 0);
  load(Steps::Next(first_key), 1);

  BeginDependent();
  const int64_t width =
      static_cast<int64_t>(params.num_heads + 2 * params.num_kv_heads) * params.head_dim;
  const __nv_bfloat16* qkv_row =
      static_cast<const __nv_bfloat16*>(params.qkv) + block.token * width;
  LoadDecodeQuery<Tile>(decode, block, qkv_row, query);
  OwnKey<Tile, kPaddedDim> own;
  const bool has_own = fused && own_key / kDecodePartKeys % kDecodeRanks == block.rank;
  if (has_own) {
    own.Load(decode, block, qkv_row);
    if (block.writes_cache) {
      const int in_block = own_key % params.kv.block_tokens;
      const int64_t row = KvRowOffset(
          params.kv, params.batch.block_ids[first_block + own_key / params.kv.block_tokens],
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
  for (int key = first_key; key < block.context; key = Steps::Next(key)) {
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
    load(Steps::Next(Steps::Next(key)), stage);
    stage = 1 - stage;
  }
  rows.ReduceWeight();
  if constexpr (kCluster) {
    JoinInCluster(params, block, rows, reinterpret_cast<float*>(stages), exchange);
  } else {
    LeavePartials(decode, block, rows, reinterpret_cast<float*>(stages));
  }
}

template <int kPaddedDim, bool kVector, bool kCluster>
cudaError_t LaunchDecodeKernel(const DecodeAttentionParams& params, cudaStream_t stream) {
  using Tile = AttentionTile<kPaddedDim, false>;
  const auto kernel = DecodeAttentionKernel<kPaddedDim, kVector, kCluster>;
  const auto shared_bytes = [](int rows) {
    const int exchange = kDecodeRanks * DecodeExchange<kPaddedDim>::PartFloats(rows);
    return Tile::kSharedBytes + (kCluster ? 4 * exchange : 0);
  };
  static const cudaError_t kAttributeError = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes(kNarrowRows));
  if (kAttributeError != cudaSuccess) return kAttributeError;
  const PagedAttentionParams& attention = params.attention;
  const int group = attention.num_heads / attention.num_kv_heads;
  const int tiles = (group + kNarrowRows - 1) / kNarrowRows;
  const dim3 grid(kDecodeRanks, static_cast<unsigned>(tiles * attention.num_kv_heads),
                  static_cast<unsigned>(attention.batch.num_sequences));
  const auto bytes = static_cast<size_t>(shared_bytes(std::min(group, kNarrowRows)));
  if constexpr (!kCluster) {
    return LaunchDependent(kernel, grid, Tile::kThreads, bytes, stream, params);
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {kDecodeRanks, 1, 1};
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
