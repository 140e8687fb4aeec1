// What the attention kernels read besides the op's params, and their launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/work.h"
#include "kernels/op_params.h"

namespace flashquant::cuda {

// Wide tiles, in device memory.
struct AttentionWork {
  const AttentionItem* wide = nullptr;
  int32_t num_wide = 0;
  bool fp8_cache = false;  // else BF16
};

// Of an FP8 cache, whose instances take whole pieces of 16 bytes only.
inline constexpr int kFp8DimMultiple = 16;

// Queues the tiles. head_dim even, 2 to kMaxHeadDim; with an FP8 cache a multiple of
// kFp8DimMultiple. A row's bits depend on its own keys, not on
// other rows.
cudaError_t LaunchAttentionTiles(const PagedAttentionParams& params, const AttentionWork& work,
                                 cudaStream_t stream);

// Attention of the sequences that have one query row in the step; the others' rows are left as they
// are.
struct DecodeAttentionParams {
  PagedAttentionParams attention;
  // Set: q and the row's own key are not rotated yet, and key and value not written to the cache;
  // this does both, and leaves qkv as it is. [max positions, D] as in RopeAndKvWriteParams.
  const float* cos_sin = nullptr;
  bool fp8_cache = false;  // else BF16
  DecodeSplit split;
  // Null: the ranks are a cluster (sm_90 and later). Else [num_sequences][split.ranks][tiles of
  // all KV heads][kNarrowRows][head_dim] sums of weight * value and [..][kNarrowRows][2]: the
  // greatest score (in powers of two) and the sum of weights relative to it.
  float* partial_sums = nullptr;
  float* partial_weights = nullptr;
};

// FP32 elements of partial_sums and partial_weights together.
int64_t DecodePartialFloats(const PagedAttentionParams& params, int ranks);
// Blocks of 16 query heads that share a KV head, over all KV heads.
int NumDecodeTiles(const PagedAttentionParams& params);

cudaError_t LaunchDecodeAttention(const DecodeAttentionParams& params, cudaStream_t stream);

// Parts of the launchers, one source file each. kPaddedDim: 32, 64, 96, 128 or 256, at least
// head_dim.
template <int kPaddedDim>
cudaError_t LaunchTilesOfDim(const PagedAttentionParams& params, const AttentionWork& work,
                             cudaStream_t stream);
template <int kPaddedDim>
cudaError_t LaunchDecodeOfDim(const DecodeAttentionParams& params, cudaStream_t stream);

}  // namespace flashquant::cuda
