// A warp's keys and values in decode attention: a ring of shared-memory stages, each the warp's 16
// keys of a step and their values, that the warp fills for itself, so that the warps of a block do
// not wait for each other.
#pragma once

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/key_loader.cuh"
#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/primitives/cp_async.cuh"
#include "kernels/cuda/primitives/mma.cuh"
#include "kernels/cuda/primitives/thread_index.cuh"

namespace flashquant::cuda {

// kVector: a head is whole pieces of 16 bytes. All lanes call all functions together; `first` is
// the warp's first key of a step.
template <typename Tile, int kPaddedDim, bool kVector>
class WarpKeyRing {
  static_assert(Tile::kWarpKeys == 16);
  using Element = typename Tile::Kv::Element;

 public:
  // Keys at or beyond `end` become zeros and are not read. `stages`: the warp's.
  __device__ WarpKeyRing(const PagedAttentionParams& params, int first_block, int end, int kv_head,
                         uint8_t* stages)
      : params_(params),
        rows_(params, first_block, end, kv_head),
        stages_(stages),
        lane_(ThreadOfBlock() % 32) {}

  // The cache's block of the lane's key. Nothing here waits for the load; Start does.
  __device__ int Find(int first) const { return rows_.FindBlock(first + lane_ % 16); }

  // Fills a stage; all lanes have passed a __syncwarp behind the last read of it. `block_id`:
  // Find(first).
  __device__ void Start(int block_id, int first, int stage) const {
    const int row = rows_.Row(block_id, first + lane_ % 16);
    if constexpr (kVector) {
      CopyPieces(row, Stage(stage));
    } else {
      CopyElements(row, Stage(stage));
    }
    CommitCopies();
  }
  // In place of Start where there is nothing to fill a stage with.
  __device__ void StartNothing() const { CommitCopies(); }

  // Returns when the oldest fill is there.
  __device__ void Wait() const {
    WaitForCopiesAllBut<Tile::kStages - 1>();
    __syncwarp();
  }

  // Rows of 16 keys, then of their values.
  __device__ uint8_t* Stage(int stage) const { return stages_ + stage * Tile::kWarpStageBytes; }

 private:
  __device__ void CopyPieces(int lane_row, uint8_t* to) const {
    constexpr int kPieces = kPaddedDim * Tile::kElementBytes / 16;  // of a row
    static_assert(16 * kPieces % 32 == 0, "shuffles need whole warps");
    const int row_bytes = params_.head_dim * Tile::kElementBytes;
    const auto* k_cache = static_cast<const uint8_t*>(params_.k_cache);
    const auto* v_cache = static_cast<const uint8_t*>(params_.v_cache);
#pragma unroll
    for (int j = 0; j < kPieces / 2; ++j) {
      const int key = (lane_ + 32 * j) / kPieces;
      const int piece = (lane_ + 32 * j) % kPieces;
      const int row = __shfl_sync(0xffffffffu, lane_row, key);
      if (piece * 16 >= row_bytes) continue;
      const bool valid = row != CacheRows::kNoRow;
      const int64_t from = static_cast<int64_t>(valid ? row : 0) * row_bytes + piece * 16;
      const uint32_t place = SharedAddress(to) + key * Tile::kRowBytes + piece * 16;
      CopyAsync16(place, k_cache + from, valid ? 16 : 0);
      CopyAsync16(place + 16 * Tile::kRowBytes, v_cache + from, valid ? 16 : 0);
    }
  }

  __device__ void CopyElements(int lane_row, uint8_t* to) const {
    const auto* k_cache = static_cast<const Element*>(params_.k_cache);
    const auto* v_cache = static_cast<const Element*>(params_.v_cache);
#pragma unroll 4
    for (int i = lane_; i < 16 * kPaddedDim; i += 32) {
      const int key = i / kPaddedDim;
      const int dim = i % kPaddedDim;
      const int row = __shfl_sync(0xffffffffu, lane_row, key);
      if (dim >= params_.head_dim) continue;
      const int64_t from = static_cast<int64_t>(row) * params_.head_dim + dim;
      auto* place = reinterpret_cast<Element*>(to + key * Tile::kRowBytes) + dim;
      place[0] = row != CacheRows::kNoRow ? k_cache[from] : Element{};
      place[16 * Tile::kRowBytes / Tile::kElementBytes] =
          row != CacheRows::kNoRow ? v_cache[from] : Element{};
    }
  }

  const PagedAttentionParams& params_;
  CacheRows rows_;
  uint8_t* stages_;
  int lane_;
};

}  // namespace flashquant::cuda
