// One pass sorts the slots into tiles (counting sort), then each tile is laid out on its own.
// Inside a tile a counting sort over (column, row) also finds repeated positions.
#include "kernels/format/tile_coo_encoder.h"

#include <algorithm>
#include <array>
#include <limits>
#include <queue>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/format/tile_coo_validate.h"

namespace flashquant {
namespace {

constexpr size_t kMaxTileEdge = 256;
constexpr size_t kMaxBuckets = 64;
constexpr size_t kMaxRowClasses = 8;

// Row classes of the circular element order: 1 keeps rows ascending.
size_t NumRowClasses(TileCooOrderHint hint) {
  switch (hint) {
    case TileCooOrderHint::kNone:
      return 1;
    case TileCooOrderHint::kPaper:
      return 4;
    case TileCooOrderHint::kKMajor:
      return 8;
  }
  return 1;
}

size_t RowClass(TileCooOrderHint hint, uint8_t row) {
  switch (hint) {
    case TileCooOrderHint::kNone:
      return 0;
    case TileCooOrderHint::kPaper:
      return (row / 2u) % 4u;
    case TileCooOrderHint::kKMajor:
      return row % 8u;
  }
  return 0;
}

// A column may use bucket b when b % classes equals its own class.
size_t NumColumnClasses(TileCooOrderHint hint) { return hint == TileCooOrderHint::kKMajor ? 8 : 1; }

absl::Status CheckEncodable(const TileCooGeometry& geometry) {
  const absl::Status status = ValidateTileCooGeometry(geometry);
  if (!status.ok()) return InvalidArgumentError("{}", std::string(status.message()));
  if (geometry.column_mode != TileCooColumnMode::kShared) {
    return InvalidArgumentError("outliers: the encoder writes shared columns only (col_mode 1)");
  }
  return absl::OkStatus();
}

bool IsStorable(TileCooValueType type, uint16_t bits) {
  const uint16_t infinity = type == TileCooValueType::kBFloat16 ? 0x7f80u : 0x7c00u;
  return (bits & 0x7fffu) != 0 && (bits & infinity) != infinity;
}

}  // namespace

// Working memory of one tile, kept from tile to tile.
struct TileCooTileEncoder::Scratch {
  std::array<uint32_t, kMaxTileEdge + 1> column_begin{};  // into `sorted`
  std::vector<TileCooTileSlot> sorted;                    // by column, then row
  std::array<std::vector<uint8_t>, kMaxBuckets> columns_of_bucket;
};

namespace {

// Sorts by column and, inside a column, by row; fails on a position given twice.
absl::Status SortSlots(std::span<const TileCooTileSlot> slots,
                       std::array<uint32_t, kMaxTileEdge + 1>& column_begin,
                       std::vector<TileCooTileSlot>& sorted) {
  std::array<uint32_t, kMaxTileEdge + 1> next{};
  for (const TileCooTileSlot& slot : slots) ++next[slot.column + 1u];
  for (size_t c = 0; c < kMaxTileEdge; ++c) next[c + 1] += next[c];
  column_begin = next;
  sorted.resize(slots.size());
  for (const TileCooTileSlot& slot : slots) sorted[next[slot.column]++] = slot;
  for (size_t c = 0; c < kMaxTileEdge; ++c) {
    const auto begin = sorted.begin() + column_begin[c];
    const auto end = sorted.begin() + column_begin[c + 1];
    std::sort(begin, end, [](const auto& a, const auto& b) { return a.row < b.row; });
    const auto twice =
        std::adjacent_find(begin, end, [](const auto& a, const auto& b) { return a.row == b.row; });
    if (twice != end) {
      return InvalidArgumentError("row {} column {} of the tile given twice", twice->row, c);
    }
  }
  return absl::OkStatus();
}

// Columns by falling load, each to the least-loaded bucket of its class; ties to the lower column
// and bucket. Fills columns_of_bucket with ascending columns.
void BalanceColumns(const TileCooGeometry& geometry,
                    const std::array<uint32_t, kMaxTileEdge + 1>& column_begin,
                    std::array<std::vector<uint8_t>, kMaxBuckets>& columns_of_bucket) {
  using Entry = std::pair<uint32_t, uint32_t>;  // load, then column (falling load) or bucket
  std::vector<Entry> columns;
  for (uint32_t c = 0; c < kMaxTileEdge; ++c) {
    const uint32_t load = CeilDiv<uint32_t>(column_begin[c + 1] - column_begin[c], 4);
    if (load > 0) columns.emplace_back(load, c);
  }
  std::sort(columns.begin(), columns.end(), [](const Entry& a, const Entry& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  const size_t num_classes = NumColumnClasses(geometry.order_hint);
  std::array<std::priority_queue<Entry, std::vector<Entry>, std::greater<>>, 8> least_loaded;
  for (uint32_t b = 0; b < static_cast<uint32_t>(geometry.buckets_per_tile); ++b) {
    least_loaded[b % num_classes].emplace(0, b);
    columns_of_bucket[b].clear();
  }
  for (const auto& [load, column] : columns) {
    auto& heap = least_loaded[column % num_classes];
    const auto [bucket_load, bucket] = heap.top();
    heap.pop();
    heap.emplace(bucket_load + load, bucket);
    columns_of_bucket[bucket].push_back(static_cast<uint8_t>(column));
  }
  for (auto& list : columns_of_bucket) std::sort(list.begin(), list.end());
}

// Appends the records of one column. `first_class` is the row class wanted by its first slot; each
// further slot wants the next class, and takes the next one upwards that still has rows.
void AppendColumn(TileCooOrderHint hint, std::span<const TileCooTileSlot> column,
                  size_t first_class, std::vector<TileCooRecord>& records) {
  const size_t num_classes = NumRowClasses(hint);
  // Slots of each class, still in ascending rows: a column has at most 256.
  std::array<uint16_t, kMaxRowClasses + 1> class_end{};
  std::array<uint8_t, kMaxTileEdge> order{};
  for (const auto& slot : column) ++class_end[RowClass(hint, slot.row) + 1];
  for (size_t c = 0; c < num_classes; ++c) class_end[c + 1] += class_end[c];
  std::array<uint16_t, kMaxRowClasses> class_next{};
  std::copy_n(class_end.begin(), num_classes, class_next.begin());
  for (size_t i = 0; i < column.size(); ++i) {
    order[class_next[RowClass(hint, column[i].row)]++] = static_cast<uint8_t>(i);
  }
  std::copy_n(class_end.begin(), num_classes, class_next.begin());

  for (size_t i = 0; i < column.size(); ++i) {
    size_t row_class = (first_class + i) % num_classes;
    while (class_next[row_class] == class_end[row_class + 1]) {
      row_class = (row_class + 1) % num_classes;
    }
    const TileCooTileSlot& slot = column[order[class_next[row_class]++]];
    if (i % kSlotsPerRecord == 0) {
      // Null slots repeat the record's first position.
      TileCooRecord record;
      record.row.fill(slot.row);
      record.col.fill(slot.column);
      records.push_back(record);
    }
    records.back().row[i % kSlotsPerRecord] = slot.row;
    records.back().value[i % kSlotsPerRecord] = slot.value_bits;
  }
}

}  // namespace

TileCooTileEncoder::TileCooTileEncoder(const TileCooGeometry& geometry,
                                       std::unique_ptr<Scratch> scratch)
    : geometry_(geometry), scratch_(std::move(scratch)) {}
TileCooTileEncoder::TileCooTileEncoder(TileCooTileEncoder&&) noexcept = default;
TileCooTileEncoder& TileCooTileEncoder::operator=(TileCooTileEncoder&&) noexcept = default;
TileCooTileEncoder::~TileCooTileEncoder() = default;

absl::StatusOr<TileCooTileEncoder> TileCooTileEncoder::Create(const TileCooGeometry& geometry) {
  FQ_RETURN_IF_ERROR(CheckEncodable(geometry));
  return TileCooTileEncoder(geometry, std::make_unique<Scratch>());
}

absl::Status TileCooTileEncoder::Encode(std::span<const TileCooTileSlot> slots,
                                        std::vector<TileCooBucket>& buckets,
                                        std::vector<TileCooRecord>& records) {
  for (const TileCooTileSlot& slot : slots) {
    if (!IsStorable(geometry_.value_type, slot.value_bits)) {
      return InvalidArgumentError(
          "row {} column {} of the tile: value {:#06x} is zero or not finite", slot.row,
          slot.column, slot.value_bits);
    }
  }
  FQ_RETURN_IF_ERROR(SortSlots(slots, scratch_->column_begin, scratch_->sorted));
  BalanceColumns(geometry_, scratch_->column_begin, scratch_->columns_of_bucket);

  const size_t tile_first = records.size();
  const std::span<const TileCooTileSlot> sorted = scratch_->sorted;
  for (size_t b = 0; b < static_cast<size_t>(geometry_.buckets_per_tile); ++b) {
    const size_t bucket_first = records.size();
    for (const uint8_t column : scratch_->columns_of_bucket[b]) {
      const size_t begin = scratch_->column_begin[column];
      const size_t end = scratch_->column_begin[column + 1u];
      // Slots are numbered through the bucket, null ones included.
      const size_t first_slot = (records.size() - bucket_first) * kSlotsPerRecord;
      AppendColumn(geometry_.order_hint, sorted.subspan(begin, end - begin), first_slot + b,
                   records);
    }
    // A full 256 x 256 tile has 16384 records: both fit 16 bits.
    buckets.push_back({static_cast<uint16_t>(bucket_first - tile_first),
                       static_cast<uint16_t>(records.size() - bucket_first)});
  }
  return absl::OkStatus();
}

namespace {

// Slots in tile order with their coordinates inside the tile.
struct TiledSlots {
  std::vector<size_t> tile_begin;  // [num_tiles + 1]
  std::vector<TileCooTileSlot> slots;
  int64_t num_fillers = 0;
};

size_t TileOf(const TileCooGeometry& geometry, const TileCooSlot& slot) {
  return static_cast<size_t>(slot.n / geometry.tile_n * geometry.num_tiles_k() +
                             slot.k / geometry.tile_k);
}

absl::StatusOr<TiledSlots> SplitIntoTiles(const TileCooGeometry& geometry,
                                          std::span<const TileCooSlot> slots) {
  TiledSlots tiled;
  tiled.tile_begin.assign(static_cast<size_t>(geometry.num_tiles()) + 1, 0);
  for (const TileCooSlot& slot : slots) {
    if (slot.k < 0 || slot.k >= geometry.k || slot.n < 0 || slot.n >= geometry.n) {
      return InvalidArgumentError("outliers: slot at k {} n {} outside K {} N {}", slot.k, slot.n,
                                  geometry.k, geometry.n);
    }
    ++tiled.tile_begin[TileOf(geometry, slot) + 1];
    if (slot.filler) ++tiled.num_fillers;
  }
  for (size_t t = 1; t < tiled.tile_begin.size(); ++t)
    tiled.tile_begin[t] += tiled.tile_begin[t - 1];
  std::vector<size_t> next(tiled.tile_begin.begin(), tiled.tile_begin.end() - 1);
  tiled.slots.resize(slots.size());
  for (const TileCooSlot& slot : slots) {
    tiled.slots[next[TileOf(geometry, slot)]++] = {static_cast<uint8_t>(slot.k % geometry.tile_k),
                                                   static_cast<uint8_t>(slot.n % geometry.tile_n),
                                                   slot.value_bits};
  }
  return tiled;
}

}  // namespace

absl::StatusOr<EncodedTileCoo> EncodeTileCoo(const TileCooGeometry& geometry,
                                             std::span<const TileCooSlot> slots) {
  FQ_ASSIGN_OR_RETURN(TileCooTileEncoder encoder, TileCooTileEncoder::Create(geometry));
  constexpr int64_t kMaxBucketEntries = int64_t{1} << 30;
  if (geometry.num_tiles() > kMaxBucketEntries / geometry.buckets_per_tile) {
    return ResourceExhaustedError("outliers: {} tiles of {} buckets, limit {} buckets",
                                  geometry.num_tiles(), geometry.buckets_per_tile,
                                  kMaxBucketEntries);
  }
  FQ_ASSIGN_OR_RETURN(const TiledSlots tiled, SplitIntoTiles(geometry, slots));

  EncodedTileCoo result;
  TileCooArrays& arrays = result.arrays;
  const auto num_tiles = static_cast<size_t>(geometry.num_tiles());
  arrays.tile_indptr.reserve(num_tiles + 1);
  arrays.tile_indptr.push_back(0);
  arrays.bucket_info.reserve(num_tiles * static_cast<size_t>(geometry.buckets_per_tile));
  arrays.records.reserve(slots.size() / 3);
  for (size_t t = 0; t < num_tiles; ++t) {
    const size_t begin = tiled.tile_begin[t];
    const absl::Status status =
        encoder.Encode(std::span(tiled.slots).subspan(begin, tiled.tile_begin[t + 1] - begin),
                       arrays.bucket_info, arrays.records);
    if (!status.ok()) return Annotate(status, fmt::format("outliers: tile {}", t));
    if (arrays.records.size() > std::numeric_limits<uint32_t>::max()) {
      return ResourceExhaustedError("outliers: more than {} records",
                                    std::numeric_limits<uint32_t>::max());
    }
    arrays.tile_indptr.push_back(static_cast<uint32_t>(arrays.records.size()));
  }
  const auto num_slots = static_cast<int64_t>(slots.size());
  result.counts.filler = tiled.num_fillers;
  result.counts.real = num_slots - tiled.num_fillers;
  result.counts.null = static_cast<int64_t>(arrays.records.size()) * kSlotsPerRecord - num_slots;
  return result;
}

}  // namespace flashquant
