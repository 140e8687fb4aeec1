// One pass over the three arrays.
#include "kernels/format/tile_coo_statistics.h"

#include <algorithm>

namespace flashquant {

TileCooStatistics ComputeTileCooStatistics(const TileCooMatrix& matrix) {
  const TileCooArrays& arrays = matrix.arrays();
  const auto buckets_per_tile = static_cast<size_t>(matrix.geometry().buckets_per_tile);
  TileCooStatistics statistics;
  statistics.num_tiles = matrix.geometry().num_tiles();
  statistics.num_records = matrix.num_records();
  double balance_sum = 0.0;
  for (size_t tile = 0; tile + 1 < arrays.tile_indptr.size(); ++tile) {
    const uint32_t num_records = arrays.tile_indptr[tile + 1] - arrays.tile_indptr[tile];
    statistics.max_tile_records = std::max(statistics.max_tile_records, num_records);
    if (num_records == 0) {
      ++statistics.num_empty_tiles;
      continue;
    }
    uint32_t fullest = 0;
    for (size_t b = 0; b < buckets_per_tile; ++b) {
      fullest = std::max<uint32_t>(fullest, arrays.bucket_info[tile * buckets_per_tile + b].count);
    }
    statistics.max_bucket_records = std::max(statistics.max_bucket_records, fullest);
    balance_sum += static_cast<double>(num_records) /
                   (static_cast<double>(fullest) * static_cast<double>(buckets_per_tile));
  }
  for (const TileCooRecord& record : arrays.records) {
    statistics.num_null_slots += std::count(record.value.begin(), record.value.end(), 0);
  }
  const int64_t num_used_tiles = statistics.num_tiles - statistics.num_empty_tiles;
  if (num_used_tiles > 0) {
    statistics.bucket_balance = balance_sum / static_cast<double>(num_used_tiles);
  }
  return statistics;
}

}  // namespace flashquant
