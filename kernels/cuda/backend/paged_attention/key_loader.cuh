// Bringing the keys and values of a step from the paged cache into shared memory.
#pragma once

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/primitives/cp_async.cuh"
#include "kernels/cuda/primitives/mma.cuh"
#include "kernels/cuda/primitives/thread_index.cuh"

namespace flashquant::cuda {

// Which rows of a layer's cache hold the keys of a sequence, for one KV head.
class CacheRows {
 public:
  static constexpr int kNoRow = -1;

  // `first_block`: of the sequence, in AttentionBatch::block_ids. Keys at or beyond `end` have no
  // row. Positions times block_tokens are below 2^32.
  __device__ CacheRows(const PagedAttentionParams& params, int first_block, int end, int kv_head)
      : block_ids_(params.batch.block_ids + first_block),
        end_(end),
        kv_head_(kv_head),
        num_kv_heads_(params.kv.num_kv_heads),
        block_tokens_(params.kv.block_tokens),
        inverse_block_tokens_(0xffffffffu / static_cast<unsigned>(params.kv.block_tokens) + 1) {}

  // The id of the block that holds the key. Nothing here waits for the load; Row does.
  __device__ int FindBlock(int key) const { return key < end_ ? block_ids_[BlockOf(key)] : 0; }

  // `block_id`: FindBlock(key). Fewer than 2^31 rows fit in any device's memory.
  __device__ int Row(int block_id, int key) const {
    if (key >= end_) return kNoRow;
    return (block_id * num_kv_heads_ + kv_head_) * block_tokens_ + key -
           BlockOf(key) * block_tokens_;
  }

 private:
  __device__ int BlockOf(int key) const {  // in the sequence
    return block_tokens_ == 1
               ? key
               : static_cast<int>(__umulhi(static_cast<unsigned>(key), inverse_block_tokens_));
  }

  const int32_t* block_ids_;
  int end_;
  int kv_head_;
  int num_kv_heads_;
  int block_tokens_;
  // 2^32 / block_tokens, rounded up: a division takes 30 instructions.
  unsigned inverse_block_tokens_;
};

// Copies the rows of keys first .. first + kKeys of one KV head to both arrays of a stage; keys at
// or beyond `end` become zeros and are not read. All threads of the block call it together.
template <typename Tile, int kPaddedDim>
class KeyLoader {
  using Element = typename Tile::Kv::Element;

 public:
  // The cache's blocks that hold the keys of a step: each lane has found those of one or two, for
  // all.
  struct Blocks {
    int id[Tile::kKeys / 32];
  };

  __device__ KeyLoader(const PagedAttentionParams& params, int first_block, int end, int kv_head,
                       uint8_t* stages)
      : params_(params),
        cache_rows_(params, first_block, end, kv_head),
        stages_(stages),
        lane_(ThreadOfBlock() % 32) {}

  // Nothing here waits for the loads; Copy does.
  __device__ Blocks Find(int first) const {
    Blocks blocks;
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 32; ++i) {
      blocks.id[i] = cache_rows_.FindBlock(first + i * 32 + lane_);
    }
    return blocks;
  }

  // `blocks`: Find(first). kVector: a head is whole pieces of 16 bytes.
  template <bool kVector>
  __device__ void Copy(const Blocks& blocks, int first, int stage) const {
    Rows rows;
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 32; ++i) {
      rows.of[i] = cache_rows_.Row(blocks.id[i], first + i * 32 + lane_);
    }
    uint8_t* const to = stages_ + stage * 2 * Tile::kStageBytes;
    if constexpr (kVector) {
      CopyPieces(rows, to);
    } else {
      CopyElements(rows, to);
    }
    CommitCopies();
  }

  template <bool kVector>
  __device__ void Load(int first, int stage) const {
    Copy<kVector>(Find(first), first, stage);
  }

 private:
  static constexpr int kNoRow = CacheRows::kNoRow;

  // Each lane's keys of a step, as rows of the cache.
  struct Rows {
    int of[Tile::kKeys / 32];
  };

  __device__ static int RowOf(const Rows& rows, int key) {
    int row = __shfl_sync(0xffffffffu, rows.of[0], key % 32);
    if constexpr (Tile::kKeys == 64) {
      const int upper = __shfl_sync(0xffffffffu, rows.of[1], key % 32);
      row = key < 32 ? row : upper;
    }
    return row;
  }

  // In pieces of 16 bytes. A thread has the same piece of every kStep-th key, where that works out.
  __device__ void CopyPieces(const Rows& rows, uint8_t* to) const {
    constexpr int kPieces = kPaddedDim * Tile::kElementBytes / 16;  // of a row
    constexpr int kCopies = Tile::kKeys * kPieces / Tile::kThreads;
    constexpr bool kSamePiece = Tile::kThreads % kPieces == 0;
    constexpr int kStep = Tile::kThreads / kPieces;
    static_assert(Tile::kKeys * kPieces % Tile::kThreads == 0, "shuffles need whole warps");
    const int row_bytes = params_.head_dim * Tile::kElementBytes;
    const auto* k_cache = static_cast<const uint8_t*>(params_.k_cache);
    const auto* v_cache = static_cast<const uint8_t*>(params_.v_cache);
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      const int i = thread + j * Tile::kThreads;
      const int key = kSamePiece ? thread / kPieces + j * kStep : i / kPieces;
      const int piece = kSamePiece ? thread % kPieces : i % kPieces;
      // Which half of a step the key is in is known where kStep divides it.
      const int row = kSamePiece && kStep <= 32
                          ? __shfl_sync(0xffffffffu, rows.of[j * kStep / 32], key % 32)
                          : RowOf(rows, key);
      if (piece * 16 >= row_bytes) continue;
      const bool valid = row != kNoRow;
      const int64_t from = static_cast<int64_t>(valid ? row : 0) * row_bytes + piece * 16;
      const uint32_t place = SharedAddress(to) + key * Tile::kRowBytes + piece * 16;
      CopyAsync16(place, k_cache + from, valid ? 16 : 0);
      CopyAsync16(place + Tile::kStageBytes, v_cache + from, valid ? 16 : 0);
    }
  }

  __device__ void CopyElements(const Rows& rows, uint8_t* to) const {
    static_assert(Tile::kKeys * kPaddedDim % Tile::kThreads == 0, "shuffles need whole warps");
    const auto* k_cache = static_cast<const Element*>(params_.k_cache);
    const auto* v_cache = static_cast<const Element*>(params_.v_cache);
#pragma unroll 4
    for (int i = threadIdx.x; i < Tile::kKeys * kPaddedDim; i += Tile::kThreads) {
      const int key = i / kPaddedDim;
      const int dim = i % kPaddedDim;
      const int row = RowOf(rows, key);
      if (dim >= params_.head_dim) continue;
      const int64_t from = static_cast<int64_t>(row) * params_.head_dim + dim;
      auto* place = reinterpret_cast<Element*>(to + key * Tile::kRowBytes) + dim;
      place[0] = row != kNoRow ? k_cache[from] : Element{};
      place[Tile::kStageBytes / Tile::kElementBytes] = row != kNoRow ? v_cache[from] : Element{};
    }
  }

  const PagedAttentionParams& params_;
  CacheRows cache_rows_;
  uint8_t* stages_;
  int lane_;
};

}  // namespace flashquant::cuda
