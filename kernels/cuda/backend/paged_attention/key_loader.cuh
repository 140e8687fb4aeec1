// Bringing the keys and values of a step from the paged cache into shared memory.
#pragma once

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

// 16 bytes from global to shared memory, zeros when `valid` is false.
__device__ __forceinline__ void CopyAsync16(uint32_t shared_address, const void* from, bool valid) {
  const int source_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(from),
               "r"(source_bytes)
               : "memory");
}

// Copies the rows of keys first .. first + kKeys of one KV head to both arrays of a stage; keys at
// or beyond `end` become zeros and are not read.
template <typename Tile, int kPaddedDim>
class KeyLoader {
  using Element = typename Tile::Kv::Element;

 public:
  // `first_block`: of the sequence, in AttentionBatch::block_ids.
  __device__ KeyLoader(const PagedAttentionParams& params, int first_block, int end, int kv_head,
                       uint8_t* stages)
      : params_(params),
        block_ids_(params.batch.block_ids + first_block),
        end_(end),
        kv_head_(kv_head),
        stages_(stages) {}

  // All threads; kVector: a head is whole pieces of 16 bytes.
  template <bool kVector>
  __device__ void Load(int first, int stage) const {
    constexpr int kChunk = kVector ? 16 / Tile::kElementBytes : 1;
    constexpr int kChunks = kPaddedDim / kChunk;
    static_assert(Tile::kKeys * kChunks % Tile::kThreads == 0, "shuffles need whole warps");
    const int num_chunks = params_.head_dim / kChunk;
    const auto* k_cache = static_cast<const Element*>(params_.k_cache);
    const auto* v_cache = static_cast<const Element*>(params_.v_cache);
    uint8_t* k_stage = stages_ + stage * 2 * Tile::kStageBytes;
    uint8_t* v_stage = k_stage + Tile::kStageBytes;
    // Each lane finds the places of one or two keys and all share them: a lookup and a division a
    // key instead of one for every 16 bytes.
    int rows[Tile::kKeys / 32];
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 32; ++i) {
      rows[i] = CacheRow(first + i * 32 + static_cast<int>(threadIdx.x % 32));
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < Tile::kKeys * kChunks; i += Tile::kThreads) {
      const int key = i / kChunks;
      const int chunk = i % kChunks;
      int row = __shfl_sync(0xffffffffu, rows[0], key % 32);
      if constexpr (Tile::kKeys == 64) {
        const int upper = __shfl_sync(0xffffffffu, rows[1], key % 32);
        row = key < 32 ? row : upper;
      }
      if (chunk >= num_chunks) continue;
      const bool valid = row != kNoRow;
      const int64_t from =
          valid ? static_cast<int64_t>(row) * params_.head_dim + chunk * kChunk : 0;
      const int to = key * Tile::kRowBytes + chunk * kChunk * Tile::kElementBytes;
      if constexpr (kVector) {
        CopyAsync16(SharedAddress(k_stage + to), k_cache + from, valid);
        CopyAsync16(SharedAddress(v_stage + to), v_cache + from, valid);
      } else {
        *reinterpret_cast<Element*>(k_stage + to) = valid ? k_cache[from] : Element{};
        *reinterpret_cast<Element*>(v_stage + to) = valid ? v_cache[from] : Element{};
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

 private:
  static constexpr int kNoRow = -1;

  // Row of a key in the cache: fewer than 2^31 rows fit in any device's memory.
  __device__ int CacheRow(int key) const {
    if (key >= end_) return kNoRow;
    const int block_tokens = params_.kv.block_tokens;
    const int block = key / block_tokens;
    return (block_ids_[block] * params_.kv.num_kv_heads + kv_head_) * block_tokens + key -
           block * block_tokens;
  }

  const PagedAttentionParams& params_;
  const int32_t* block_ids_;
  int end_;
  int kv_head_;
  uint8_t* stages_;
};

}  // namespace flashquant::cuda
