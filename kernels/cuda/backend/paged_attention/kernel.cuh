// The attention tile: online softmax over 64-key (32 for D above 128) steps with tensor cores, in
// the manner of FlashAttention-2. A warp owns 16 virtual rows; warps of a block share the keys and
// values, which arrive in two shared-memory stages by cp.async.
//
// Key steps begin at multiples of their length from position 0 and masked keys add exact zeros, so
// a row's bits are the same in a one-warp and a four-warp tile and in any chunking of its prompt.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/primitives/kv_row.cuh"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

// Shapes of the instance for heads of up to kPaddedDim.
template <int kPaddedDim, int kWarps>
struct AttentionTile {
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeys = kPaddedDim > 128 ? 32 : 64;
  // Eight elements more than a power of two: rows start in different banks.
  static constexpr int kStride = kPaddedDim + 8;
  static constexpr int kQueryElements = kRows * kStride;
  static constexpr int kStageElements = kKeys * kStride;  // keys or values of one stage
  static constexpr int kSharedBytes = 2 * (kQueryElements + 4 * kStageElements);
};

__device__ __forceinline__ void LdMatrixX4(uint32_t (&r)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}

// 16 bytes from global to shared memory, zeros when `valid` is false.
__device__ __forceinline__ void CopyAsync16(uint32_t shared_address, const void* from, bool valid) {
  const int source_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(from),
               "r"(source_bytes)
               : "memory");
}

__device__ __forceinline__ uint32_t PackPair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Copies the rows of keys first .. first + kKeys of one KV head to both arrays of a stage; keys at
// or beyond `end` become zeros and are not read.
template <typename Tile, int kPaddedDim>
class KeyLoader {
 public:
  __device__ KeyLoader(const PagedAttentionParams& params, const AttentionItem& item, int kv_head,
                       __nv_bfloat16* stages)
      : params_(params),
        block_ids_(params.batch.block_ids + params.batch.block_indptr[item.sequence]),
        end_(item.end_key),
        kv_head_(kv_head),
        stages_(stages) {}

  // All threads; kVector: D is a multiple of 8.
  template <bool kVector>
  __device__ void Load(int first, int stage) const {
    constexpr int kChunk = kVector ? 8 : 1;
    constexpr int kChunks = kPaddedDim / kChunk;
    const int num_chunks = params_.head_dim / kChunk;
    const auto* k_cache = static_cast<const __nv_bfloat16*>(params_.k_cache);
    const auto* v_cache = static_cast<const __nv_bfloat16*>(params_.v_cache);
    __nv_bfloat16* k_stage = stages_ + stage * 2 * Tile::kStageElements;
    __nv_bfloat16* v_stage = k_stage + Tile::kStageElements;
#pragma unroll 4
    for (int i = threadIdx.x; i < Tile::kKeys * kChunks; i += Tile::kThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      if (chunk >= num_chunks) continue;
      const bool valid = first + row < end_;
      const int64_t from = valid ? Offset(first + row) + chunk * kChunk : 0;
      const int to = row * Tile::kStride + chunk * kChunk;
      if constexpr (kVector) {
        CopyAsync16(SharedAddress(k_stage + to), k_cache + from, valid);
        CopyAsync16(SharedAddress(v_stage + to), v_cache + from, valid);
      } else {
        const __nv_bfloat16 zero = __float2bfloat16_rn(0.0f);
        k_stage[to] = valid ? k_cache[from] : zero;
        v_stage[to] = valid ? v_cache[from] : zero;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

 private:
  __device__ int64_t Offset(int key) const {
    const int block = key / params_.kv.block_tokens;
    return KvRowOffset(params_.kv, block_ids_[block], kv_head_,
                       key - block * params_.kv.block_tokens);
  }

  const PagedAttentionParams& params_;
  const int32_t* block_ids_;
  int end_;
  int kv_head_;
  __nv_bfloat16* stages_;
};

// One warp's 16 virtual rows: lane holds rows lane / 4 and lane / 4 + 8 (index 0 and 1).
template <typename Tile, int kPaddedDim>
struct WarpRows {
  float sums[kPaddedDim / 8][4] = {};
  float max[2] = {-INFINITY, -INFINITY};
  float weight[2] = {0.0f, 0.0f};  // this lane's share
  int begin[2] = {0, 0};           // keys that the row sees: [begin, end)
  int end[2] = {0, 0};

  // Scores of one key step, scaled to powers of two.
  __device__ void Score(uint32_t query, uint32_t keys, int first_key, float scale_log2,
                        float (&scores)[Tile::kKeys / 8][4]) const {
    const int lane = threadIdx.x % 32;
    const uint32_t query_lane = query + 2 * ((lane % 16) * Tile::kStride + lane / 16 * 8);
    const uint32_t key_lane =
        keys + 2 * ((lane / 16 * 8 + lane % 8) * Tile::kStride + lane / 8 % 2 * 8);
#pragma unroll
    for (int n = 0; n < Tile::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kPaddedDim; d += 16) {
      uint32_t a[4];
      LdMatrixX4(a, query_lane + 2 * d);
#pragma unroll
      for (int n = 0; n < Tile::kKeys / 16; ++n) {
        uint32_t b[4];
        LdMatrixX4(b, key_lane + 2 * (n * 16 * Tile::kStride + d));
        MmaBf16(scores[2 * n], a, b[0], b[1], scores[2 * n]);
        MmaBf16(scores[2 * n + 1], a, b[2], b[3], scores[2 * n + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < Tile::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + n * 8 + lane % 4 * 2 + i % 2;
        const bool seen = key >= begin[i / 2] && key < end[i / 2];
        scores[n][i] = seen ? scores[n][i] * scale_log2 : -INFINITY;
      }
    }
  }

  // Turns scores into weights relative to the new maximum and scales what was summed to it.
  __device__ void Rescale(float (&scores)[Tile::kKeys / 8][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float greatest = max[r];
#pragma unroll
      for (int n = 0; n < Tile::kKeys / 8; ++n) {
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
      for (int n = 0; n < Tile::kKeys / 8; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          // As the tensor core will see it, so that the weights of the average add up to 1.
          scores[n][i] = __bfloat162float(__float2bfloat16_rn(exp2f(scores[n][i] - base)));
          weight[r] += scores[n][i];
        }
      }
    }
  }

  __device__ void AddValues(uint32_t values, const float (&weights)[Tile::kKeys / 8][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t value_lane = values + 2 * ((lane % 16) * Tile::kStride + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < Tile::kKeys / 16; ++k) {
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

// Where virtual row `row` of a sequence's KV head is: its query row in the step and its head.
struct RowPlace {
  int64_t token = 0;
  int head = 0;
  __device__ RowPlace(const PagedAttentionParams& params, int sequence, int row, int kv_head) {
    const int group = params.num_heads / params.num_kv_heads;
    token = params.batch.query_indptr[sequence] + row / group;
    head = kv_head * group + row % group;
  }
};

template <typename Tile>
__device__ void LoadQueries(const PagedAttentionParams& params, const AttentionItem& item,
                            int kv_head, __nv_bfloat16* query) {
  const int d = params.head_dim;
  const int64_t width = static_cast<int64_t>(params.num_heads + 2 * params.num_kv_heads) * d;
  for (int row = threadIdx.x / 32; row < item.num_rows; row += Tile::kThreads / 32) {
    const RowPlace place(params, item.sequence, item.first_row + row, kv_head);
    const __nv_bfloat16* from =
        static_cast<const __nv_bfloat16*>(params.qkv) + place.token * width + place.head * d;
    for (int i = threadIdx.x % 32; i < d; i += 32) query[row * Tile::kStride + i] = from[i];
  }
}

// Writes both of a lane's rows: averages to the output, or sums to the partials.
template <typename Tile, int kPaddedDim>
__device__ void StoreRows(const PagedAttentionParams& params, const AttentionWork& work,
                          const AttentionItem& item, int kv_head,
                          const WarpRows<Tile, kPaddedDim>& rows) {
  const int lane = threadIdx.x % 32;
  const int d = params.head_dim;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = threadIdx.x / 32 * 16 + r * 8 + lane / 4;
    if (row >= item.num_rows) continue;
    if (item.partial == kWholeRow) {
      const RowPlace place(params, item.sequence, item.first_row + row, kv_head);
      __nv_bfloat16* out = static_cast<__nv_bfloat16*>(params.out) +
                           (place.token * params.num_heads + place.head) * d;
#pragma unroll
      for (int n = 0; n < kPaddedDim / 8; ++n) {
        const int i = n * 8 + lane % 4 * 2;
        if (i >= d) continue;
        *reinterpret_cast<uint32_t*>(out + i) = PackPair(rows.sums[n][2 * r] / rows.weight[r],
                                                         rows.sums[n][2 * r + 1] / rows.weight[r]);
      }
      continue;
    }
    const int64_t place =
        (static_cast<int64_t>(item.partial) * params.num_kv_heads + kv_head) * kNarrowRows + row;
#pragma unroll
    for (int n = 0; n < kPaddedDim / 8; ++n) {
      const int i = n * 8 + lane % 4 * 2;
      if (i >= d) continue;
      work.partial_sums[place * d + i] = rows.sums[n][2 * r];
      work.partial_sums[place * d + i + 1] = rows.sums[n][2 * r + 1];
    }
    if (lane % 4 == 0) {
      work.partial_weights[place * 2] = rows.max[r];
      work.partial_weights[place * 2 + 1] = rows.weight[r];
    }
  }
}

// Grid: (items, KV heads).
template <int kPaddedDim, int kWarps, bool kVector>
__global__ void __launch_bounds__(32 * kWarps)
    AttentionTileKernel(PagedAttentionParams params, AttentionWork work,
                        const AttentionItem* items) {
  using Tile = AttentionTile<kPaddedDim, kWarps>;
  extern __shared__ uint4 shared[];
  const AttentionItem item = items[blockIdx.x];
  const int kv_head = blockIdx.y;
  auto* query = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* stages = query + Tile::kQueryElements;

  // Dimensions beyond D and rows beyond the tile's stay zero.
  for (int i = threadIdx.x; i < Tile::kSharedBytes / 16; i += Tile::kThreads) {
    shared[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  const KeyLoader<Tile, kPaddedDim> loader(params, item, kv_head, stages);
  loader.template Load<kVector>(item.first_key, 0);
  LoadQueries<Tile>(params, item, kv_head, query);

  WarpRows<Tile, kPaddedDim> rows;
  const int group = params.num_heads / params.num_kv_heads;
  const int first_position =
      params.batch.context_lengths[item.sequence] -
      (params.batch.query_indptr[item.sequence + 1] - params.batch.query_indptr[item.sequence]);
  const int warp_row = threadIdx.x / 32 * 16;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + r * 8 + threadIdx.x % 32 / 4;
    if (row >= item.num_rows) continue;
    rows.end[r] = first_position + (item.first_row + row) / group + 1;
    rows.begin[r] = params.sliding_window > 0 ? max(0, rows.end[r] - params.sliding_window) : 0;
  }
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
    const __nv_bfloat16* k_stage = stages + stage * 2 * Tile::kStageElements;
    float scores[Tile::kKeys / 8][4];
    rows.Score(SharedAddress(query + warp_row * Tile::kStride), SharedAddress(k_stage), key,
               scale_log2, scores);
    rows.Rescale(scores);
    rows.AddValues(SharedAddress(k_stage + Tile::kStageElements), scores);
    __syncthreads();
    stage = 1 - stage;
  }
  rows.ReduceWeight();
  StoreRows(params, work, item, kv_head, rows);
}

template <int kPaddedDim, int kWarps, bool kVector>
cudaError_t LaunchTileKernel(const PagedAttentionParams& params, const AttentionWork& work,
                             const AttentionItem* items, int num_items, cudaStream_t stream) {
  if (num_items == 0) return cudaSuccess;
  constexpr int kSharedBytes = AttentionTile<kPaddedDim, kWarps>::kSharedBytes;
  const auto kernel = AttentionTileKernel<kPaddedDim, kWarps, kVector>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(num_items), static_cast<unsigned>(params.num_kv_heads));
  kernel<<<grid, 32 * kWarps, kSharedBytes, stream>>>(params, work, items);
  return cudaGetLastError();
}

template <int kPaddedDim>
cudaError_t LaunchAttentionTiles(const PagedAttentionParams& params, const AttentionWork& work,
                                 cudaStream_t stream) {
  constexpr int kWideWarps = WideTileRows(kPaddedDim) / 16;
  const bool vectors = params.head_dim % 8 == 0;
  const auto narrow =
      vectors ? LaunchTileKernel<kPaddedDim, 1, true> : LaunchTileKernel<kPaddedDim, 1, false>;
  const auto wide = vectors ? LaunchTileKernel<kPaddedDim, kWideWarps, true>
                            : LaunchTileKernel<kPaddedDim, kWideWarps, false>;
  const cudaError_t error = narrow(params, work, work.narrow, work.num_narrow, stream);
  if (error != cudaSuccess) return error;
  return wide(params, work, work.wide, work.num_wide, stream);
}

}  // namespace flashquant::cuda
