// The attention tile: online softmax over steps of 64 keys (32 for D above 128) with tensor cores,
// in the manner of FlashAttention-2. Keys and values of a step arrive in two or three shared-memory
// stages by cp.async. In a wide tile each warp owns 16 virtual rows and sees all keys of a step; in
// a narrow one all warps have the same 16 rows and 16 keys of each step, with stages and sums of
// their own that are joined at the end, so that a decode row is not left to one warp. A narrow tile
// may have twice the warps and keys of a step, for blocks that have an SM to themselves.
//
// Steps begin at multiples of their length from position 0 and masked keys add exact zeros, so a
// row's bits do not depend on the other rows of its tile nor on how its prompt was chunked.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/kv_type.cuh"
#include "kernels/cuda/backend/paged_attention/params.h"
#include "kernels/cuda/primitives/thread_index.cuh"

namespace flashquant::cuda {

enum class TileKind { kWide, kNarrow, kNarrowDouble };

// Shapes of the instance for heads of up to kPaddedDim and a cache of KvType (kv_type.cuh).
template <int kPaddedDim, TileKind kKind, typename KvType>
struct AttentionTile {
  using Kv = KvType;
  static constexpr bool kWide = kKind == TileKind::kWide;
  static constexpr int kKeys =  // of a step
      (kPaddedDim > 128 ? 32 : 64) * (kKind == TileKind::kNarrowDouble ? 2 : 1);
  static constexpr int kWarps = kWide ? WideTileRows(kPaddedDim) / 16 : kKeys / 16;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = kWide ? 16 * kWarps : kNarrowRows;
  static constexpr int kWarpKeys = kWide ? kKeys : 16;  // of a step, one warp's
  // 16 bytes more than a power of two: rows start in different banks.
  static constexpr int kStride = kPaddedDim + 8;  // of queries, which have 16 bits each
  static constexpr int kQueryBytes = 2 * kRows * kStride;
  static constexpr int kElementBytes = sizeof(typename Kv::Element);
  static constexpr int kRowBytes = kPaddedDim * kElementBytes + 16;  // of a key or a value
  static constexpr int kStages = kWide ? 2 : DecodeStages(kElementBytes);
  static constexpr int kStageBytes = kKeys * kRowBytes;  // keys or values of one stage
  static constexpr int kSharedBytes = kQueryBytes + kStages * 2 * kStageBytes;
  // A narrow tile's warps each have a part of every stage: 16 keys, then their values.
  static constexpr int kWarpStageBytes = 2 * 16 * kRowBytes;
  static constexpr int kWarpBytes = kStages * kWarpStageBytes;  // follow each other
  // They leave their sums, maxima and weights where their stages were.
  static constexpr int kSumStride = kPaddedDim + 4;  // floats of a row, whole pieces of 16 bytes
  static_assert(kWide || 4 * kNarrowRows * kSumStride <= kWarpBytes);
};

// exp2f without its care for results below 2^-126: as weights they are as good as 0.
__device__ __forceinline__ float PowerOfTwo(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// One warp's 16 virtual rows: lane holds rows lane / 4 and lane / 4 + 8 (index 0 and 1).
template <typename Tile, int kPaddedDim>
struct WarpRows {
  using Kv = typename Tile::Kv;
  float sums[kPaddedDim / 8][4] = {};
  float max[2] = {-INFINITY, -INFINITY};
  float weight[2] = {0.0f, 0.0f};  // this lane's share
  int begin[2] = {0, 0};           // keys that the row sees: [begin, end)
  int end[2] = {0, 0};
  int lane = ThreadOfBlock() % 32;

  // Scores of the warp's keys of a step, scaled to powers of two.
  __device__ void Score(uint32_t query, uint32_t keys, int first_key, float scale_log2,
                        float (&scores)[Tile::kWarpKeys / 8][4]) const {
    const uint32_t query_lane = query + 2 * ((lane % 16) * Tile::kStride + lane / 16 * 8);
    const uint32_t key_lane =
        keys + (lane / 16 * 8 + lane % 8) * Tile::kRowBytes + lane / 8 % 2 * 16;
#pragma unroll
    for (int n = 0; n < Tile::kWarpKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kPaddedDim; d += 16 * Kv::kBlocks) {
      uint32_t a[Kv::kBlocks][4];
#pragma unroll
      for (int i = 0; i < Kv::kBlocks; ++i) LdMatrixX4(a[i], query_lane + 2 * (d + 16 * i));
#pragma unroll
      for (int n = 0; n < Tile::kWarpKeys / 16; ++n) {
        uint32_t b[Kv::kBlocks][4];
        Kv::LoadKeys(key_lane + n * 16 * Tile::kRowBytes + d * Tile::kElementBytes, b);
#pragma unroll
        for (int i = 0; i < Kv::kBlocks; ++i) {
          Kv::Mma(scores[2 * n], a[i], b[i][0], b[i][1]);
          Kv::Mma(scores[2 * n + 1], a[i], b[i][2], b[i][3]);
        }
      }
    }
    const bool sees_all = first_key >= ::max(begin[0], begin[1]) &&
                          first_key + Tile::kWarpKeys <= ::min(end[0], end[1]);
    if (__all_sync(0xffffffffu, sees_all)) {
#pragma unroll
      for (int n = 0; n < Tile::kWarpKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] *= scale_log2;
      }
      return;
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

  // What Score multiplies products of queries and codes by.
  __device__ static float ScaleLog2(const PagedAttentionParams& params) {
    const float scale = params.softmax_scale * 1.44269504088896341f;
    return Kv::kScaled ? scale * params.kv_scales.k * Kv::ReadFactor() : scale;
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
      // Most steps have no greater score than the ones before.
      if (__any_sync(0xffffffffu, greatest != max[r])) {
        const float factor = exp2f(max[r] - base);
        max[r] = greatest;
        weight[r] *= factor;
#pragma unroll
        for (int n = 0; n < kPaddedDim / 8; ++n) {
          sums[n][2 * r] *= factor;
          sums[n][2 * r + 1] *= factor;
        }
      }
#pragma unroll
      for (int n = 0; n < Tile::kWarpKeys / 8; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          // As the tensor core will see it, so that the weights of the average add up to 1.
          scores[n][i] = Kv::RoundWeight(PowerOfTwo(scores[n][i] - base));
          weight[r] += scores[n][i];
        }
      }
    }
  }

  __device__ void AddValues(uint32_t values, const float (&weights)[Tile::kWarpKeys / 8][4]) {
    const uint32_t value_lane = values + lane % 16 * Tile::kRowBytes + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < Tile::kWarpKeys / 16; ++k) {
      const uint32_t a[4] = {Kv::WeightPair(weights[2 * k][0], weights[2 * k][1]),
                             Kv::WeightPair(weights[2 * k][2], weights[2 * k][3]),
                             Kv::WeightPair(weights[2 * k + 1][0], weights[2 * k + 1][1]),
                             Kv::WeightPair(weights[2 * k + 1][2], weights[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kPaddedDim / 16; n += Kv::kBlocks) {
        uint32_t b[Kv::kBlocks][4];
        Kv::LoadValues(value_lane + k * 16 * Tile::kRowBytes + n * 16 * Tile::kElementBytes, b);
#pragma unroll
        for (int i = 0; i < Kv::kBlocks; ++i) {
          Kv::Mma(sums[2 * (n + i)], a, b[i][0], b[i][1]);
          Kv::Mma(sums[2 * (n + i) + 1], a, b[i][2], b[i][3]);
        }
      }
    }
  }

  // The sum of weights of both rows, from the four lanes that share them; averages of codes then
  // come out as those of values.
  __device__ void ReduceWeight(const KvScales& scales) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], 1);
      weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], 2);
      if constexpr (Kv::kScaled) weight[r] /= scales.v * Kv::ReadFactor();
    }
  }
};

}  // namespace flashquant::cuda
