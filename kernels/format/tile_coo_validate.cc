// Per-tile marks (which bucket a column is in, which positions are taken) are cleared by walking
// the tile's own records again: a file of many nearly empty tiles then costs no more than its size.
#include "kernels/format/tile_coo_validate.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <limits>
#include <memory>

#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int kMaxTileEdge = 256;
constexpr int kNoBucket = -1;

bool IsTileEdge(int32_t edge) { return edge == 64 || edge == 128 || edge == 256; }

struct TilePlace {
  int64_t tile = 0;
  int32_t num_rows = 0;  // rows and columns of the tile that lie inside the matrix
  int32_t num_columns = 0;
};

TilePlace PlaceOf(const TileCooGeometry& geometry, int64_t tile) {
  const int64_t k0 = tile % geometry.num_tiles_k() * geometry.tile_k;
  const int64_t n0 = tile / geometry.num_tiles_k() * geometry.tile_n;
  return {tile, static_cast<int32_t>(std::min<int64_t>(geometry.tile_k, geometry.k - k0)),
          static_cast<int32_t>(std::min<int64_t>(geometry.tile_n, geometry.n - n0))};
}

// Checks the records of one tile at a time; state is empty between tiles.
class RecordChecker {
 public:
  explicit RecordChecker(const TileCooGeometry& geometry) : geometry_(geometry) {
    bucket_of_column_.fill(kNoBucket);
    infinity_ = geometry.value_type == TileCooValueType::kBFloat16 ? 0x7f80u : 0x7c00u;
  }

  absl::Status CheckBucket(const TilePlace& place, int bucket,
                           std::span<const TileCooRecord> records) {
    for (const TileCooRecord& record : records) {
      absl::Status status = CheckRecord(place, bucket, record);
      if (!status.ok()) {
        return Annotate(status, fmt::format("outliers: tile {} bucket {}", place.tile, bucket));
      }
    }
    return absl::OkStatus();
  }

  void Clear(std::span<const TileCooRecord> records) {
    for (const TileCooRecord& record : records) {
      for (size_t s = 0; s < kSlotsPerRecord; ++s) {
        bucket_of_column_[record.col[s]] = kNoBucket;
        taken_.reset(Position(record, s));
      }
    }
  }

 private:
  static size_t Position(const TileCooRecord& record, size_t slot) {
    return static_cast<size_t>(record.col[slot]) * kMaxTileEdge + record.row[slot];
  }

  absl::Status CheckRecord(const TilePlace& place, int bucket, const TileCooRecord& record) {
    for (size_t s = 0; s < kSlotsPerRecord; ++s) {
      if (record.row[s] >= place.num_rows) {
        return DataLossError("row {} outside the tile (limit {})", record.row[s],
                             place.num_rows - 1);
      }
      if (record.col[s] >= place.num_columns) {
        return DataLossError("column {} outside the tile (limit {})", record.col[s],
                             place.num_columns - 1);
      }
      if (geometry_.column_mode == TileCooColumnMode::kShared && record.col[s] != record.col[0]) {
        return DataLossError("columns {} and {} in one record of shared column mode", record.col[0],
                             record.col[s]);
      }
      int16_t& owner = bucket_of_column_[record.col[s]];
      if (owner == kNoBucket) owner = static_cast<int16_t>(bucket);
      if (owner != bucket) {
        return DataLossError("column {} also occurs in bucket {}", record.col[s], owner);
      }
      FQ_RETURN_IF_ERROR(CheckValue(record, s));
    }
    return absl::OkStatus();
  }

  absl::Status CheckValue(const TileCooRecord& record, size_t slot) {
    const uint16_t value = record.value[slot];
    if (value == 0) return absl::OkStatus();
    if (value == 0x8000u) {
      return DataLossError("value -0 at row {} column {}", record.row[slot], record.col[slot]);
    }
    if ((value & infinity_) == infinity_) {
      return DataLossError("value {:#06x} at row {} column {} is not finite", value,
                           record.row[slot], record.col[slot]);
    }
    const size_t position = Position(record, slot);
    if (taken_.test(position)) {
      return DataLossError("position row {} column {} stored twice", record.row[slot],
                           record.col[slot]);
    }
    taken_.set(position);
    return absl::OkStatus();
  }

  const TileCooGeometry& geometry_;
  uint32_t infinity_ = 0;  // exponent bits, all ones
  std::array<int16_t, kMaxTileEdge> bucket_of_column_{};
  std::bitset<kMaxTileEdge * kMaxTileEdge> taken_;
};

absl::Status CheckSizes(const TileCooGeometry& geometry, const TileCooArrays& arrays) {
  // Tiles: at most 2^25 x 2^25, times 64 buckets: no product here can wrap.
  const auto num_tiles = static_cast<uint64_t>(geometry.num_tiles());
  const uint64_t num_buckets = num_tiles * static_cast<uint64_t>(geometry.buckets_per_tile);
  if (arrays.tile_indptr.size() != num_tiles + 1) {
    return DataLossError("outliers: tile_indptr holds {} entries, {} tiles need {}",
                         arrays.tile_indptr.size(), num_tiles, num_tiles + 1);
  }
  if (arrays.bucket_info.size() != num_buckets) {
    return DataLossError("outliers: bucket_info holds {} buckets, {} tiles of {} need {}",
                         arrays.bucket_info.size(), num_tiles, geometry.buckets_per_tile,
                         num_buckets);
  }
  if (arrays.records.size() > std::numeric_limits<uint32_t>::max()) {
    return DataLossError("outliers: {} records, limit {}", arrays.records.size(),
                         std::numeric_limits<uint32_t>::max());
  }
  return absl::OkStatus();
}

absl::Status CheckTileIndptr(const TileCooGeometry& geometry, const TileCooArrays& arrays) {
  const std::vector<uint32_t>& indptr = arrays.tile_indptr;
  const auto tile_limit = static_cast<uint32_t>(geometry.tile_k * geometry.tile_n) / 4;
  if (indptr.front() != 0) {
    return DataLossError("outliers: tile_indptr starts with {}, allowed 0", indptr.front());
  }
  for (size_t tile = 0; tile + 1 < indptr.size(); ++tile) {
    if (indptr[tile + 1] < indptr[tile]) {
      return DataLossError("outliers: tile {}: tile_indptr falls from {} to {}", tile, indptr[tile],
                           indptr[tile + 1]);
    }
    if (indptr[tile + 1] - indptr[tile] > tile_limit) {
      return DataLossError("outliers: tile {}: {} records (limit {})", tile,
                           indptr[tile + 1] - indptr[tile], tile_limit);
    }
  }
  if (indptr.back() != arrays.records.size()) {
    return DataLossError("outliers: tile_indptr ends with {}, but there are {} records",
                         indptr.back(), arrays.records.size());
  }
  return absl::OkStatus();
}

absl::Status CheckTile(const TilePlace& place, std::span<const TileCooBucket> buckets,
                       std::span<const TileCooRecord> records, RecordChecker& checker) {
  uint32_t sum = 0;
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].offset != sum) {
      return DataLossError(
          "outliers: tile {} bucket {}: offset {}, but the counts before it sum to {}", place.tile,
          b, buckets[b].offset, sum);
    }
    sum += buckets[b].count;
    if (sum > records.size()) {
      return DataLossError("outliers: tile {} bucket {}: ends at record {} of the tile (limit {})",
                           place.tile, b, sum, records.size());
    }
  }
  if (sum != records.size()) {
    return DataLossError("outliers: tile {}: bucket counts sum to {}, the tile has {} records",
                         place.tile, sum, records.size());
  }
  for (size_t b = 0; b < buckets.size(); ++b) {
    FQ_RETURN_IF_ERROR(checker.CheckBucket(place, static_cast<int>(b),
                                           records.subspan(buckets[b].offset, buckets[b].count)));
  }
  checker.Clear(records);
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateTileCooGeometry(const TileCooGeometry& geometry) {
  constexpr int64_t kMaxDimension = std::numeric_limits<int32_t>::max();
  if (geometry.k < 1 || geometry.k > kMaxDimension) {
    return DataLossError("outliers: K is {}, allowed 1..{}", geometry.k, kMaxDimension);
  }
  if (geometry.n < 1 || geometry.n > kMaxDimension) {
    return DataLossError("outliers: N is {}, allowed 1..{}", geometry.n, kMaxDimension);
  }
  if (!IsTileEdge(geometry.tile_k)) {
    return DataLossError("outliers: tile_k is {}, allowed 64, 128, 256", geometry.tile_k);
  }
  if (!IsTileEdge(geometry.tile_n)) {
    return DataLossError("outliers: tile_n is {}, allowed 64, 128, 256", geometry.tile_n);
  }
  const int32_t buckets = geometry.buckets_per_tile;
  if (buckets != 8 && buckets != 16 && buckets != 32 && buckets != 64) {
    return DataLossError("outliers: buckets_per_tile is {}, allowed 8, 16, 32, 64", buckets);
  }
  if (geometry.value_type > TileCooValueType::kHalf) {
    return DataLossError("outliers: value_type is {}, allowed 0, 1",
                         static_cast<int>(geometry.value_type));
  }
  if (geometry.column_mode > TileCooColumnMode::kShared) {
    return DataLossError("outliers: col_mode is {}, allowed 0, 1",
                         static_cast<int>(geometry.column_mode));
  }
  if (geometry.semantics > TileCooSemantics::kResidual) {
    return DataLossError("outliers: semantics is {}, allowed 0, 1",
                         static_cast<int>(geometry.semantics));
  }
  if (geometry.order_hint > TileCooOrderHint::kKMajor) {
    return DataLossError("outliers: order_hint is {}, allowed 0, 1, 2",
                         static_cast<int>(geometry.order_hint));
  }
  return absl::OkStatus();
}

absl::Status ValidateTileCoo(const TileCooGeometry& geometry, const TileCooArrays& arrays) {
  FQ_RETURN_IF_ERROR(ValidateTileCooGeometry(geometry));
  FQ_RETURN_IF_ERROR(CheckSizes(geometry, arrays));
  FQ_RETURN_IF_ERROR(CheckTileIndptr(geometry, arrays));
  const auto checker = std::make_unique<RecordChecker>(geometry);
  const auto buckets_per_tile = static_cast<size_t>(geometry.buckets_per_tile);
  for (int64_t tile = 0; tile < geometry.num_tiles(); ++tile) {
    const auto t = static_cast<size_t>(tile);
    const uint32_t first = arrays.tile_indptr[t];
    const uint32_t num_records = arrays.tile_indptr[t + 1] - first;
    FQ_RETURN_IF_ERROR(
        CheckTile(PlaceOf(geometry, tile),
                  std::span(arrays.bucket_info).subspan(t * buckets_per_tile, buckets_per_tile),
                  std::span(arrays.records).subspan(first, num_records), *checker));
  }
  return absl::OkStatus();
}

absl::Status ValidateOutliersAgainstInt4(const Int4Weight& weight, const TileCooMatrix& matrix) {
  FQ_RETURN_IF_ERROR(ValidateInt4Weight(weight));
  const TileCooGeometry& geometry = matrix.geometry();
  if (weight.n != geometry.n || weight.k != geometry.k) {
    return DataLossError("outliers: shape K {} N {} beside an INT4 weight of K {} N {}", geometry.k,
                         geometry.n, weight.k, weight.n);
  }
  if (weight.group_size != weight.k_padded && geometry.tile_k % weight.group_size != 0) {
    return DataLossError("outliers: tile_k {} is no multiple of the INT4 group size {}",
                         geometry.tile_k, weight.group_size);
  }
  if (geometry.semantics != TileCooSemantics::kReplace) return absl::OkStatus();
  absl::Status status;
  matrix.ForEachSlot([&](int64_t k, int64_t n, uint16_t) {
    if (!status.ok()) return;
    const int32_t code = weight.Code(n, k);
    const int32_t zero_point = weight.ZeroPoint(n, k / weight.group_size);
    if (code != zero_point) {
      status = DataLossError(
          "outliers: slot at k {} n {}: dense code {} is not the zero point {} (replace mode)", k,
          n, code, zero_point);
    }
  });
  return status;
}

}  // namespace flashquant
