// The form in which the kernel of the paper's own mapping (paper_kernel.cu) reads a weight: tiles
// of 256 input x 128 output features, K fastest, the outliers of a tile beside its codes.
//
// 1. Dense, tile by tile: codes [strip of 64 channels][k16 step][lane] of 16 bytes, that is one
// word
//    for each of the strip's four m16 blocks. Lane (g, t) = (lane / 4, lane % 4); bits 4r + 16h of
//    a word are the code of channel g + 8 * (r % 2), feature 2t + h + 8 * (r / 2): register r of an
//    MMA's A fragment after a shift and a mask. Then scales [group][channel] in BF16, then, with
//    zero points, 128 + z in the same order.
// 2. Outliers as Tile-COO has them (kernels/format/tile_coo.h): tile_indptr, bucket_info, records.
//
// Source: paper sections on tiling, Tile-COO and reordering; design "kernel" 3.1, strategy 1a.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/linear_w4a16/pack.h"

namespace flashquant::cuda {

inline constexpr int kPaperTileK = 256;
inline constexpr int kPaperTileN = 128;
inline constexpr int kPaperCodeBytes = kPaperTileK * kPaperTileN / 2;
inline constexpr int kPaperStripN = 64;
inline constexpr int kPaperBucketsPerWarp = 4;  // eight lanes, one a batch row, for each bucket
inline constexpr int kPaperDenseWarps = 8;
inline constexpr int kPaperSparseWarps = 4;  // of a kernel with extra warps

// Sizes of a packed layer. Offsets are bytes from the start of its buffer.
struct PaperLayout {
  int32_t n = 0;
  int32_t k = 0;
  int32_t tiles_n = 0;
  int32_t tiles_k = 0;
  int32_t groups_per_tile = 1;  // along K: 1, 2, 4 or 8
  bool has_zeros = false;
  int32_t tile_dense_bytes = 0;
  int32_t buckets_per_tile = 0;
  int32_t max_records = 0;  // of a tile; 0: the layer has no outliers
  int64_t indptr_offset = 0;
  int64_t buckets_offset = 0;
  int64_t records_offset = 0;
  int64_t num_bytes = 0;
};

struct PaperLinear {
  PaperLayout layout;
  std::vector<uint8_t> bytes;
};

enum class PaperOrder : uint8_t {
  kNone,       // columns to buckets in even ranges, rows rising
  kReordered,  // columns to the least loaded bucket, rows in turns of (k / 2) % 4
};

// Packs one layer. `outliers`: tiles of 256 x 128 with one column a record, or none. 1 <= buckets
// <= 128. The arrays have been validated; the result depends on them alone.
PaperLinear PackPaper(const Int4Arrays& weight, const TileCooPointers& outliers, int buckets,
                      PaperOrder order, int num_threads);

}  // namespace flashquant::cuda
