// The query of a decode row, and the row's own key and value: read from qkv, rotated, and put where
// the tile (tile.cuh) and the cache have them.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/decode_join.cuh"
#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/backend/paged_attention/tile.cuh"
#include "kernels/cuda/backend/rotary.cuh"
#include "kernels/cuda/primitives/kv_row.cuh"

namespace flashquant::cuda {

// What rotates a position's query and key: each lane has cosine and sine of the pairs of dimensions
// (i, D / 2 + i) with i = lane, lane + 32, ...
template <int kPaddedDim>
struct RotationRow {
  static constexpr int kPairs = (kPaddedDim / 2 + 31) / 32;
  float cosine[kPairs];
  float sine[kPairs];

  __device__ RotationRow(const float* cos_sin, int position, int head_dim) {
    const int half = head_dim / 2;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = threadIdx.x % 32 + 32 * j;
      cosine[j] = 1.0f;
      sine[j] = 0.0f;
      if (cos_sin == nullptr || i >= half) continue;
      const float* row = cos_sin + static_cast<int64_t>(position) * head_dim;
      cosine[j] = row[i];
      sine[j] = row[half + i];
    }
  }
};

// The same pairs of one head. Loading and use are apart, so that keys can be asked for in between.
template <int kPaddedDim>
struct HeadPairs {
  static constexpr int kPairs = RotationRow<kPaddedDim>::kPairs;
  __nv_bfloat16 low[kPairs];
  __nv_bfloat16 high[kPairs];

  __device__ void Load(const __nv_bfloat16* head, int head_dim) {
    const int half = head_dim / 2;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = threadIdx.x % 32 + 32 * j;
      low[j] = i < half ? head[i] : __nv_bfloat16{};
      high[j] = i < half ? head[half + i] : __nv_bfloat16{};
    }
  }
  __device__ void Rotate(const RotationRow<kPaddedDim>& rotation) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const RotatedPair pair = cuda::Rotate(low[j], high[j], rotation.cosine[j], rotation.sine[j]);
      low[j] = pair.low;
      high[j] = pair.high;
    }
  }
  // `store`(dimension, value) for each.
  template <typename Store>
  __device__ void ForEach(int head_dim, const Store& store) const {
    const int half = head_dim / 2;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = threadIdx.x % 32 + 32 * j;
      if (i >= half) continue;
      store(i, low[j]);
      store(half + i, high[j]);
    }
  }
};

// Rows beyond the tile's and dimensions beyond D become zero. `first`: this warp's first row.
template <typename Tile, int kPaddedDim>
__device__ void StoreDecodeQuery(const DecodeAttentionParams& params, const DecodeBlock& block,
                                 const __nv_bfloat16* heads,
                                 const RotationRow<kPaddedDim>& rotation,
                                 const HeadPairs<kPaddedDim>& first, uint16_t* query) {
  const int d = params.attention.head_dim;
  const int warp = threadIdx.x / 32;
  for (int row = warp; row < kNarrowRows; row += Tile::kWarps) {
    uint16_t* to = query + row * Tile::kStride;
    const int filled = row < block.num_heads ? d : 0;
    for (int i = filled + threadIdx.x % 32; i < kPaddedDim; i += 32) to[i] = 0;
    if (row >= block.num_heads) continue;
    HeadPairs<kPaddedDim> pairs = first;
    if (row != warp) pairs.Load(heads + row * d, d);
    if (params.cos_sin != nullptr) pairs.Rotate(rotation);
    pairs.ForEach(
        d, [&](int i, __nv_bfloat16 x) { to[Tile::Kv::QueryPlace(i)] = Tile::Kv::QueryBits(x); });
  }
}

// The row's own key and value, held by the lanes of the warp that stores them.
template <typename Tile, int kPaddedDim>
struct OwnKey {
  using Kv = typename Tile::Kv;
  using Element = typename Kv::Element;
  HeadPairs<kPaddedDim> key;
  HeadPairs<kPaddedDim> value;

  __device__ void Load(const PagedAttentionParams& params, const DecodeBlock& block,
                       const __nv_bfloat16* qkv_row) {
    const int d = params.head_dim;
    const __nv_bfloat16* from = qkv_row + (params.num_heads + block.kv_head) * d;
    key.Load(from, d);
    value.Load(from + params.num_kv_heads * d, d);
  }

  // As the cache has them.
  __device__ void Store(const PagedAttentionParams& params, Element* to_key,
                        Element* to_value) const {
    const float k_inverse = Kv::kScaled ? 1.0f / params.kv_scales.k : 1.0f;
    const float v_inverse = Kv::kScaled ? 1.0f / params.kv_scales.v : 1.0f;
    key.ForEach(params.head_dim,
                [&](int i, __nv_bfloat16 x) { to_key[i] = Kv::FromBf16(x, k_inverse); });
    value.ForEach(params.head_dim,
                  [&](int i, __nv_bfloat16 x) { to_value[i] = Kv::FromBf16(x, v_inverse); });
  }
  __device__ void WriteToCache(const PagedAttentionParams& params, const DecodeBlock& block,
                               int position) const {
    const int tokens = params.kv.block_tokens;
    const int32_t id = params.batch.block_ids[block.first_block + position / tokens];
    const int64_t row = KvRowOffset(params.kv, id, block.kv_head, position % tokens);
    Store(params, static_cast<Element*>(const_cast<void*>(params.k_cache)) + row,
          static_cast<Element*>(const_cast<void*>(params.v_cache)) + row);
  }
};

}  // namespace flashquant::cuda
