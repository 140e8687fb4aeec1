// How paged attention is cut up: plain data that AttentionPlan (plan.h) makes on the host, and the
// rule by which a decode row's keys are shared out. Needs no CUDA.
//
// Terms: a sequence's query rows times the query heads that share a KV head, row by row, are its
// virtual rows; each KV head has the same. A tile is a run of virtual rows that one block works on:
// a wide one's warps share the rows (prefill), a narrow one's warps the keys (decode).
#pragma once

#include <cstdint>

#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {

inline constexpr int kNarrowRows = 16;  // virtual rows of a narrow tile
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxDecodeRanks = 8;    // blocks that share a decode row's keys, at most
inline constexpr int kDecodePartKeys = 128;  // in turns of so many keys

// The head dimension of the instance that serves head_dim.
constexpr int PaddedHeadDim(int head_dim) {
  for (const int padded : {32, 64, 96, 128}) {
    if (head_dim <= padded) return padded;
  }
  return kMaxHeadDim;
}
// Virtual rows of a wide tile; fewer for the largest heads, to fit in 99 KiB of shared memory.
constexpr int WideTileRows(int padded_dim) { return padded_dim > 128 ? 32 : 64; }

// A wide tile and the keys that it attends to: [first_key, end_key), first_key a multiple of 64,
// each row within it no further than itself and its window.
struct alignas(16) AttentionItem {
  int32_t first_token = 0;     // the sequence's first query row in the step
  int32_t first_position = 0;  // and where that stands in its context
  int32_t first_block = 0;     // of the sequence, in AttentionBatch::block_ids
  int32_t first_row = 0;       // virtual
  int32_t num_rows = 0;        // virtual, at most the tile's
  int32_t first_key = 0;
  int32_t end_key = 0;
};

// Keys and values that a decode block has in shared memory at once, in steps. More of half the size
// (an FP8 cache): three blocks of 128 dimensions still fit on one multiprocessor.
constexpr int DecodeStages(int element_bytes) { return element_bytes == 1 ? 3 : 2; }

// Dynamic shared memory of a decode block, in bytes, but for what ranks exchange: queries, then
// keys and values, each row 16 bytes longer than it need be, so that rows begin in different banks.
constexpr int DecodeBlockBytes(int padded_dim, int element_bytes, bool double_block) {
  const int keys = (padded_dim > 128 ? 32 : 64) * (double_block ? 2 : 1);
  return 2 * kNarrowRows * (padded_dim + 8) +
         DecodeStages(element_bytes) * 2 * keys * (padded_dim * element_bytes + 16);
}

// Static shared memory of the decode kernel, at most.
inline constexpr int kDecodeStaticBytes = 16;

// A rank's part of what a block joins, one slice of the dimensions: [rows][slice] sums, then of
// each row the greatest score, the sum of weights and two floats of padding.
FQ_HOST_DEVICE constexpr int ExchangePartFloats(int rows, int slice) { return rows * (slice + 4); }

// Bytes that a block of a cluster receives in all.
FQ_HOST_DEVICE constexpr int ExchangeBytes(int ranks, int rows, int padded_dim) {
  return 4 * ranks * ExchangePartFloats(rows, padded_dim / ranks);
}

// How decode rows are shared out among blocks.
struct DecodeSplit {
  int ranks = 1;  // blocks of each row and KV head tile: 1, 2, 4 or 8
  // Blocks of twice the warps; where ranks join in a cluster and a head is whole pieces of 16
  // bytes.
  bool double_blocks = false;
  // More are not to share an SM, though they would fit: as soon as a kernel's blocks leave an SM
  // the next kernel's take all the room on it, while others have none. 0: as many as fit.
  int blocks_per_sm = 0;
};

// The steps of keys of one of `ranks` ranks (1, 2, 4 or 8), in order: parts of kDecodePartKeys
// keys, counted from position 0, go to the ranks in turns. What a row computes depends on its own
// context and the split (DecodeSplit) alone. kKeys, those of a step, divides a part.
template <int kKeys>
struct DecodeSteps {
  static_assert(kDecodePartKeys % kKeys == 0);
  int ranks = 1;

  // The first step of `rank`, for a row that sees keys from `first_seen` on.
  FQ_HOST_DEVICE int First(int rank, int first_seen) const {
    const int part = first_seen / kDecodePartKeys;
    return (part + ((rank - part) & (ranks - 1))) * kDecodePartKeys;
  }
  FQ_HOST_DEVICE int Next(int key) const {
    key += kKeys;
    return key % kDecodePartKeys == 0 ? key + (ranks - 1) * kDecodePartKeys : key;
  }
  FQ_HOST_DEVICE int RankOf(int key) const { return key / kDecodePartKeys & (ranks - 1); }
};

}  // namespace flashquant::cuda
