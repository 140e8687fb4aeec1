// Tile-COO: the sparse outlier matrix W_O [K, N] beside an INT4 weight, in tiles, buckets and
// records of four outlier slots. This header restates the byte format (design "Tile-COO
// format" 8.1-8.4) as types; the validator is tile_coo_validate.h, the encoder tile_coo_encoder.h,
// the stand-alone file tile_coo_file.h.
//
// Source: paper section on Tile-COO.
// Deviation: counts and offsets are in records of four slots, not in elements, because 65536
// elements of a full tile do not fit the paper's 16-bit fields.
// Choice: 8, 16, 32 or 64 buckets per tile, so that lane-per-bucket and warp mappings both fit.
// Choice: one column per record (column mode "shared"), which the paper's listing needs; per-slot
// columns are read and checked too, but the encoder does not write them.
// Choice: rows are stored unswizzled; a kernel with a swizzled activation layout applies its own.
// Choice: the decoder adds in both semantics; "replace" makes the dense part exactly 0 at a slot.
// Choice: a slot is null exactly when its value bits are 0 and -0 is never stored, so null slots
// can be counted from the bytes; their rows and columns obey the same limits, since kernels read
// them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/bfloat16.h"
#include "kernels/base/math_util.h"

namespace flashquant {

enum class TileCooValueType : uint8_t { kBFloat16 = 0, kHalf = 1 };
enum class TileCooColumnMode : uint8_t { kPerSlot = 0, kShared = 1 };
enum class TileCooSemantics : uint8_t { kReplace = 0, kResidual = 1 };
enum class TileCooOrderHint : uint8_t { kNone = 0, kPaper = 1, kKMajor = 2 };

// Shape and layout. k, n: 1..2^31-1; tile_k, tile_n: 64, 128 or 256; buckets_per_tile: 8, 16, 32
// or 64.
struct TileCooGeometry {
  int64_t k = 0;
  int64_t n = 0;
  int32_t tile_k = 256;
  int32_t tile_n = 128;
  int32_t buckets_per_tile = 32;
  TileCooValueType value_type = TileCooValueType::kBFloat16;
  TileCooColumnMode column_mode = TileCooColumnMode::kShared;
  TileCooSemantics semantics = TileCooSemantics::kReplace;
  TileCooOrderHint order_hint = TileCooOrderHint::kKMajor;

  int64_t num_tiles_k() const { return CeilDiv<int64_t>(k, tile_k); }
  int64_t num_tiles_n() const { return CeilDiv<int64_t>(n, tile_n); }
  // Tile t = jn * num_tiles_k() + ik (K fastest) starts at k0 = ik * tile_k, n0 = jn * tile_n.
  int64_t num_tiles() const { return num_tiles_k() * num_tiles_n(); }
};

inline constexpr int kSlotsPerRecord = 4;

// The value of a slot; both types are exact in float.
constexpr float TileCooValue(TileCooValueType type, uint16_t bits) {
  return type == TileCooValueType::kBFloat16 ? ToFloat(BFloat16{bits}) : ToFloat(Half{bits});
}

// Four slots of one column (shared column mode), loaded as one 16-byte word. Row is k, column is n,
// both inside the tile. `value` holds BF16 or FP16 bits; 0x0000 marks a null slot.
struct TileCooRecord {
  std::array<uint8_t, kSlotsPerRecord> row{};
  std::array<uint8_t, kSlotsPerRecord> col{};
  std::array<uint16_t, kSlotsPerRecord> value{};
  friend bool operator==(const TileCooRecord&, const TileCooRecord&) = default;
};
static_assert(sizeof(TileCooRecord) == 16);

// Offset (from the tile's first record) and count of one bucket, both in records.
struct TileCooBucket {
  uint16_t offset = 0;
  uint16_t count = 0;
  friend bool operator==(const TileCooBucket&, const TileCooBucket&) = default;
};
static_assert(sizeof(TileCooBucket) == 4);

// What the stored slots are. A filler slot is another weight of the same column in a padding slot;
// only the encoder knows real from filler, null slots are counted from the bytes.
struct TileCooSlotCounts {
  int64_t real = 0;
  int64_t filler = 0;
  int64_t null = 0;
  friend bool operator==(const TileCooSlotCounts&, const TileCooSlotCounts&) = default;
};

// The three arrays, without the tail padding of the file.
struct TileCooArrays {
  std::vector<uint32_t> tile_indptr;       // [num_tiles + 1], in records
  std::vector<TileCooBucket> bucket_info;  // [num_tiles * buckets_per_tile]
  std::vector<TileCooRecord> records;      // [tile_indptr.back()]
};

// A validated, immutable outlier matrix. Can only be made through Create, so kernels read it
// without checks.
class TileCooMatrix final {
 public:
  // Takes the arrays after ValidateTileCoo has accepted them; DATA_LOSS with the broken rule
  // otherwise.
  static absl::StatusOr<TileCooMatrix> Create(const TileCooGeometry& geometry,
                                              TileCooArrays arrays);

  const TileCooGeometry& geometry() const { return geometry_; }
  const TileCooArrays& arrays() const { return arrays_; }
  int64_t num_records() const { return static_cast<int64_t>(arrays_.records.size()); }
  // Stored slots, null ones included.
  int64_t num_slots() const { return num_records() * kSlotsPerRecord; }
  // Stored slots / (K * N).
  double stored_density() const;

  // Calls visit(k, n, value_bits) for every non-null slot, in stored order. k, n are matrix
  // coordinates.
  template <typename Visitor>
  void ForEachSlot(Visitor&& visit) const {
    const int64_t tiles_k = geometry_.num_tiles_k();
    for (int64_t tile = 0; tile < geometry_.num_tiles(); ++tile) {
      const int64_t k0 = tile % tiles_k * geometry_.tile_k;
      const int64_t n0 = tile / tiles_k * geometry_.tile_n;
      const size_t first = arrays_.tile_indptr[static_cast<size_t>(tile)];
      const size_t last = arrays_.tile_indptr[static_cast<size_t>(tile) + 1];
      for (size_t r = first; r < last; ++r) {
        const TileCooRecord& record = arrays_.records[r];
        for (size_t s = 0; s < kSlotsPerRecord; ++s) {
          if (record.value[s] == 0) continue;
          visit(k0 + record.row[s], n0 + record.col[s], record.value[s]);
        }
      }
    }
  }

 private:
  TileCooMatrix(const TileCooGeometry& geometry, TileCooArrays arrays)
      : geometry_(geometry), arrays_(std::move(arrays)) {}

  TileCooGeometry geometry_;
  TileCooArrays arrays_;
};

}  // namespace flashquant
