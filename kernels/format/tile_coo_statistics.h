// Numbers about a Tile-COO matrix, for file headers, `inspect` and reports, and the paper's storage
// formula.
#pragma once

#include <cstdint>

#include "kernels/format/tile_coo.h"

namespace flashquant {

struct TileCooStatistics {
  int64_t num_tiles = 0;
  int64_t num_empty_tiles = 0;
  int64_t num_records = 0;
  int64_t num_null_slots = 0;  // stored slots with value +0
  uint32_t max_tile_records = 0;
  uint32_t max_bucket_records = 0;
  // Mean over the tiles that are not empty of (records / (buckets * fullest bucket)): 1 when every
  // bucket of a tile has the same count, the share of lanes that work when one lane serves a
  // bucket.
  double bucket_balance = 0.0;

  double mean_tile_records() const {
    return num_tiles == 0 ? 0.0 : static_cast<double>(num_records) / static_cast<double>(num_tiles);
  }
};

TileCooStatistics ComputeTileCooStatistics(const TileCooMatrix& matrix);

// The paper's size of a matrix in bytes: 4 (num_tiles + 1) + 4 num_tiles * buckets_per_tile +
// 4 num_slots. `num_slots` counts stored slots, padding (null and filler) included; tail padding,
// alignment gaps and header are not in it. Source: paper, storage cost of Tile-COO.
constexpr int64_t PaperStorageBytes(int64_t num_tiles, int64_t buckets_per_tile,
                                    int64_t num_slots) {
  return 4 * (num_tiles + 1) + 4 * num_tiles * buckets_per_tile + 4 * num_slots;
}

// The same for a matrix; equals the bytes of its three arrays.
inline int64_t PaperStorageBytes(const TileCooMatrix& matrix) {
  return PaperStorageBytes(matrix.geometry().num_tiles(), matrix.geometry().buckets_per_tile,
                           matrix.num_slots());
}

}  // namespace flashquant
