// The work items of paged attention: plain data that AttentionPlan (plan.h) makes on the host and
// the kernels read. Needs no CUDA.
//
// Terms: a sequence's query rows times the query heads that share a KV head, row by row, are its
// virtual rows; each KV head has the same. A tile is a run of virtual rows that one block works on:
// a narrow one's warps share the keys between them (decode), a wide one's warps the rows (prefill).
#pragma once

#include <cstdint>

namespace flashquant::cuda {

inline constexpr int kNarrowRows = 16;  // virtual rows of a narrow tile
inline constexpr int kSplitKeys = 256;  // keys of one part of a split row
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kWholeRow = -1;  // AttentionItem::partial: writes the output itself

// The head dimension of the instance that serves head_dim.
constexpr int PaddedHeadDim(int head_dim) {
  for (const int padded : {32, 64, 96, 128}) {
    if (head_dim <= padded) return padded;
  }
  return kMaxHeadDim;
}
// Virtual rows of a wide tile; fewer for the largest heads, to fit in 99 KiB of shared memory.
constexpr int WideTileRows(int padded_dim) { return padded_dim > 128 ? 32 : 64; }

// A tile and the keys that it attends to: [first_key, end_key), first_key a multiple of 64, each
// row within it no further than itself and its window.
struct alignas(16) AttentionItem {
  int32_t first_token = 0;     // the sequence's first query row in the step
  int32_t first_position = 0;  // and where that stands in its context
  int32_t first_block = 0;     // of the sequence, in AttentionBatch::block_ids
  int32_t first_row = 0;       // virtual
  int32_t num_rows = 0;        // virtual, at most the tile's
  int32_t first_key = 0;
  int32_t end_key = 0;
  int32_t partial = kWholeRow;  // else where the part's sums go
};

// The parts of one tile: partials first_partial .. + num_partials, in key order.
struct AttentionJoin {
  int32_t token = 0;      // query row in the step
  int32_t first_row = 0;  // virtual
  int32_t num_rows = 0;   // at most kNarrowRows
  int32_t first_partial = 0;
  int32_t num_partials = 0;
};

}  // namespace flashquant::cuda
