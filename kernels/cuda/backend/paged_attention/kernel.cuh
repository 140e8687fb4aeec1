// The attention tile: online softmax over steps of 64 keys (32 for D above 128) with tensor cores,
// in the manner of FlashAttention-2. Keys and values of a step arrive in two shared-memory stages
// by cp.async. In a wide tile each warp owns 16 virtual rows and sees all keys of a step; in a
// narrow one all warps have the same 16 rows and 16 keys of each step, with sums of their own that
// are joined at the end, so that a decode row is not left to one warp.
//
// Steps begin at multiples of their length from position 0 and masked keys add exact zeros, so a
// row's bits do not depend on the other rows of its tile nor on how its prompt was chunked.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/key_loader.cuh"
#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

// Shapes of the instance for heads of up to kPaddedDim.
template <int kPaddedDim, bool kWide>
struct AttentionTile {
  static constexpr int kKeys = kPaddedDim > 128 ? 32 : 64;  // of a step
  static constexpr int kWarps = kWide ? WideTileRows(kPaddedDim) / 16 : kKeys / 16;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = kWide ? 16 * kWarps : kNarrowRows;
  static constexpr int kWarpKeys = kWide ? kKeys : 16;  // of a step, one warp's
  // Eight elements more than a power of two: rows start in different banks.
  static constexpr int kStride = kPaddedDim + 8;
  static constexpr int kQueryElements = kRows * kStride;
  static constexpr int kStageElements = kKeys * kStride;  // keys or values of one stage
  static constexpr int kSharedBytes = 2 * (kQueryElements + 4 * kStageElements);
  // A narrow tile's warps leave their sums, maxima and weights where the stages were.
  static constexpr int kWarpSumFloats = kNarrowRows * (kPaddedDim + 2);
  static_assert(kWide || 4 * kWarps * kWarpSumFloats <= 2 * 4 * kStageElements);
};

__device__ __forceinline__ void LdMatrixX4(uint32_t (&r)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}

__device__ __forceinline__ uint32_t PackPair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// One warp's 16 virtual rows: lane holds rows lane / 4 and lane / 4 + 8 (index 0 and 1).
template <typename Tile, int kPaddedDim>
struct WarpRows {
  float sums[kPaddedDim / 8][4] = {};
  float max[2] = {-INFINITY, -INFINITY};
  float weight[2] = {0.0f, 0.0f};  // this lane's share
  int begin[2] = {0, 0};           // keys that the row sees: [begin, end)
  int end[2] = {0, 0};

  // Scores of the warp's keys of a step, scaled to powers of two.
  __device__ void Score(uint32_t query, uint32_t keys, int first_key, float scale_log2,
                        float (&scores)[Tile::kWarpKeys / 8][4]) const {
    const int lane = threadIdx.x % 32;
    const uint32_t query_lane = query + 2 * ((lane % 16) * Tile::kStride + lane / 16 * 8);
    const uint32_t key_lane =
        keys + 2 * ((lane / 16 * 8 + lane % 8) * Tile::kStride + lane / 8 % 2 * 8);
#pragma unroll
    for (int n = 0; n < Tile::kWarpKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kPaddedDim; d += 16) {
      uint32_t a[4];
      LdMatrixX4(a, query_lane + 2 * d);
#pragma unroll
      for (int n = 0; n < Tile::kWarpKeys / 16; ++n) {
        uint32_t b[4];
        LdMatrixX4(b, key_lane + 2 * (n * 16 * Tile::kStride + d));
        MmaBf16(scores[2 * n], a, b[0], b[1], scores[2 * n]);
        MmaBf16(scores[2 * n + 1], a, b[2], b[3], scores[2 * n + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < Tile::kWarpKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + n * 8 + lane % 4 * 2 + i % 2;
        const bool seen = key >= begin[i / 2] && key < end[i / 2];
        scores[n][i] = seen ? scores[n][i] * scale_log2 : -INFINITY;
      }
    }
  }

  // Turns scores into weights relative to the new maximum and scales what was summed to it.
  // `has_upper`: any of the rows 8 to 15 is one of the tile's.
  __device__ void Rescale(bool has_upper, float (&scores)[Tile::kWarpKeys / 8][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (r == 1 && !has_upper) {
#pragma unroll
        for (int n = 0; n < Tile::kWarpKeys / 8; ++n) scores[n][2] = scores[n][3] = 0.0f;
        break;
      }
      float greatest = max[r];
#pragma unroll
      for (int n = 0; n < Tile::kWarpKeys / 8; ++n) {
        greatest = fmaxf(greatest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      }
      greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 1));
      greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 2));
      // Nothing seen yet: any base will do, all weights are zero.
      const float base = greatest == -INFINITY ? 0.0f : greatest;
      const float factor = exp2f(max[r] - base);
      max[r] = greatest;
      weight[r] *= factor;
#pragma unroll
      for (int n = 0; n < kPaddedDim / 8; ++n) {
        sums[n][2 * r] *= factor;
        sums[n][2 * r + 1] *= factor;
      }
#pragma unroll
      for (int n = 0; n < Tile::kWarpKeys / 8; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          // As the tensor core will see it, so that the weights of the average add up to 1.
          scores[n][i] = __bfloat162float(__float2bfloat16_rn(exp2f(scores[n][i] - base)));
          weight[r] += scores[n][i];
        }
      }
    }
  }

  __device__ void AddValues(uint32_t values, const float (&weights)[Tile::kWarpKeys / 8][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t value_lane = values + 2 * ((lane % 16) * Tile::kStride + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < Tile::kWarpKeys / 16; ++k) {
      const uint32_t a[4] = {PackPair(weights[2 * k][0], weights[2 * k][1]),
                             PackPair(weights[2 * k][2], weights[2 * k][3]),
                             PackPair(weights[2 * k + 1][0], weights[2 * k + 1][1]),
                             PackPair(weights[2 * k + 1][2], weights[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kPaddedDim / 16; ++n) {
        uint32_t b[4];
        LdMatrixX4Trans(b, value_lane + 2 * (k * 16 * Tile::kStride + n * 16));
        MmaBf16(sums[2 * n], a, b[0], b[1], sums[2 * n]);
        MmaBf16(sums[2 * n + 1], a, b[2], b[3], sums[2 * n + 1]);
      }
    }
  }

  // The sum of weights of both rows, from the four lanes that share them.
  __device__ void ReduceWeight() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], 1);
      weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], 2);
    }
  }
};

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
                            int kv_head, __nv_bfloat16* query) {
  const int d = params.head_dim;
  const int64_t width = static_cast<int64_t>(params.num_heads + 2 * params.num_kv_heads) * d;
  for (int row = threadIdx.x / 32; row < item.num_rows; row += Tile::kWarps) {
    const RowPlace place(params, item, row, kv_head);
    const __nv_bfloat16* from =
        static_cast<const __nv_bfloat16*>(params.qkv) + place.token * width + place.head * d;
    for (int i = threadIdx.x % 32; i < d; i += 32) query[row * Tile::kStride + i] = from[i];
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
    for (int n = 0; n < kPaddedDim / 8; ++n) {
      const int i = n * 8 + lane % 4 * 2;
      if (i >= params.head_dim) continue;
      *reinterpret_cast<uint32_t*>(out + i) =
          PackPair(rows.sums[n][2 * r] / rows.weight[r], rows.sums[n][2 * r + 1] / rows.weight[r]);
    }
  }
}

// Joins the warps of a narrow tile and writes averages to the output, or sums to the partials.
// `shared`: room for all warps' sums, free of other use.
template <typename Tile, int kPaddedDim>
__device__ void StoreNarrow(const PagedAttentionParams& params, const AttentionWork& work,
                            const AttentionItem& item, int kv_head,
                            const WarpRows<Tile, kPaddedDim>& rows, float* shared) {
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
  for (int i = threadIdx.x; i < item.num_rows * kPaddedDim; i += Tile::kThreads) {
    const int row = i / kPaddedDim;
    const int column = i % kPaddedDim;
    if (column >= params.head_dim) continue;
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
    if (item.partial == kWholeRow) {
      RowPlace(params, item, row, kv_head).Output(params)[column] =
          __float2bfloat16_rn(sum / weight);
      continue;
    }
    const int64_t place =
        (static_cast<int64_t>(item.partial) * params.num_kv_heads + kv_head) * kNarrowRows + row;
    work.partial_sums[place * params.head_dim + column] = sum;
    if (column == 0) {
      work.partial_weights[place * 2] = max;
      work.partial_weights[place * 2 + 1] = weight;
    }
  }
}

// Grid: (items, KV heads).
template <int kPaddedDim, bool kWide, bool kVector>
__global__ void __launch_bounds__(AttentionTile<kPaddedDim, kWide>::kThreads)
    AttentionTileKernel(PagedAttentionParams params, AttentionWork work,
                        const AttentionItem* items) {
  using Tile = AttentionTile<kPaddedDim, kWide>;
  extern __shared__ uint4 shared[];
  const AttentionItem item = items[blockIdx.x];  // uploaded before the step
  const int kv_head = blockIdx.y;
  auto* query = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* stages = query + Tile::kQueryElements;

  // Dimensions beyond D and rows beyond the tile's stay zero.
  const int zero_bytes =
      params.head_dim == kPaddedDim ? 2 * Tile::kQueryElements : Tile::kSharedBytes;
  for (int i = threadIdx.x; i < zero_bytes / 16; i += Tile::kThreads) {
    shared[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  BeginDependent();
  const KeyLoader<Tile, kPaddedDim> loader(params, item, kv_head, stages);
  loader.template Load<kVector>(item.first_key, 0);
  LoadQueries<Tile>(params, item, kv_head, query);

  WarpRows<Tile, kPaddedDim> rows;
  const int group = params.num_heads / params.num_kv_heads;
  const int warp_row = kWide ? static_cast<int>(threadIdx.x) / 32 * 16 : 0;
  const int warp_key = kWide ? 0 : static_cast<int>(threadIdx.x) / 32 * Tile::kWarpKeys;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + r * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
    if (row >= item.num_rows) continue;
    rows.end[r] = item.first_position + (item.first_row + row) / group + 1;
    rows.begin[r] = params.sliding_window > 0 ? max(0, rows.end[r] - params.sliding_window) : 0;
  }
  const bool has_upper = item.num_rows > warp_row + 8;
  const float scale_log2 = params.softmax_scale * 1.44269504088896341f;

  int stage = 0;
  for (int key = item.first_key; key < item.end_key; key += Tile::kKeys) {
    if (key + Tile::kKeys < item.end_key) {
      loader.template Load<kVector>(key + Tile::kKeys, 1 - stage);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    __syncthreads();
    const __nv_bfloat16* keys =
        stages + stage * 2 * Tile::kStageElements + warp_key * Tile::kStride;
    float scores[Tile::kWarpKeys / 8][4];
    rows.Score(SharedAddress(query + warp_row * Tile::kStride), SharedAddress(keys), key + warp_key,
               scale_log2, scores);
    rows.Rescale(has_upper, scores);
    rows.AddValues(SharedAddress(keys + Tile::kStageElements), scores);
    __syncthreads();
    stage = 1 - stage;
  }
  rows.ReduceWeight();
  if constexpr (kWide) {
    StoreWide(params, item, kv_head, rows);
  } else {
    StoreNarrow(params, work, item, kv_head, rows, reinterpret_cast<float*>(stages));
  }
}

template <int kPaddedDim, bool kWide, bool kVector>
cudaError_t LaunchTileKernel(const PagedAttentionParams& params, const AttentionWork& work,
                             const AttentionItem* items, int num_items, cudaStream_t stream) {
  if (num_items == 0) return cudaSuccess;
  using Tile = AttentionTile<kPaddedDim, kWide>;
  const auto kernel = AttentionTileKernel<kPaddedDim, kWide, kVector>;
  static const cudaError_t kAttributeError =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (kAttributeError != cudaSuccess) return kAttributeError;
  const dim3 grid(static_cast<unsigned>(num_items), static_cast<unsigned>(params.num_kv_heads));
  return LaunchDependent(kernel, grid, Tile::kThreads, Tile::kSharedBytes, stream, params, work,
                         items);
}

template <int kPaddedDim>
cudaError_t LaunchAttentionTiles(const PagedAttentionParams& params, const AttentionWork& work,
                                 cudaStream_t stream) {
  const bool vectors = params.head_dim % 8 == 0;
  const auto narrow = vectors ? LaunchTileKernel<kPaddedDim, false, true>
                              : LaunchTileKernel<kPaddedDim, false, false>;
  const auto wide = vectors ? LaunchTileKernel<kPaddedDim, true, true>
                            : LaunchTileKernel<kPaddedDim, true, false>;
  const cudaError_t error = narrow(params, work, work.narrow, work.num_narrow, stream);
  if (error != cudaSuccess) return error;
  return wide(params, work, work.wide, work.num_wide, stream);
}

}  // namespace flashquant::cuda
