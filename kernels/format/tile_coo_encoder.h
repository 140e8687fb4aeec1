// Encoder: a list of outlier slots becomes the arrays of Tile-COO, in the canonical order of the
// format (design "Tile-COO format" 8.9), so that the same slots always give the same bytes.
//
// Which weights become outliers or fillers, and what their values are, is the quantizer's business.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/tile_coo.h"

namespace flashquant {

// One slot to store, at matrix coordinates. `value_bits` are BF16 or FP16 bits as the geometry
// says: finite and not +-0 (a chosen weight of zero gets no slot). `filler` counts, nothing else.
struct TileCooSlot {
  int32_t k = 0;
  int32_t n = 0;
  uint16_t value_bits = 0;
  bool filler = false;
};

// One slot of a single tile, at coordinates inside it.
struct TileCooTileSlot {
  uint8_t row = 0;
  uint8_t column = 0;
  uint16_t value_bits = 0;
};

struct EncodedTileCoo {
  TileCooArrays arrays;
  TileCooSlotCounts counts;
};

// Encodes all slots, in any order; null slots fill up each column's last record of a tile. Shared
// column mode only. INVALID_ARGUMENT for a slot outside the matrix, stored twice, zero or not
// finite, for a bad geometry and for per-slot columns; RESOURCE_EXHAUSTED when the arrays would
// pass 2^32 - 1 records or 2^30 buckets. Deterministic: the order of `slots` does not matter.
absl::StatusOr<EncodedTileCoo> EncodeTileCoo(const TileCooGeometry& geometry,
                                             std::span<const TileCooSlot> slots);

// Encodes tiles one by one, for a caller that has them apart or on several threads (one encoder per
// thread). Results joined in tile order, with tile_indptr the running sum of the record counts, are
// those of EncodeTileCoo.
class TileCooTileEncoder final {
 public:
  // INVALID_ARGUMENT for a bad geometry or per-slot columns.
  static absl::StatusOr<TileCooTileEncoder> Create(const TileCooGeometry& geometry);
  TileCooTileEncoder(TileCooTileEncoder&&) noexcept;
  TileCooTileEncoder& operator=(TileCooTileEncoder&&) noexcept;
  ~TileCooTileEncoder();

  // Appends the tile's records to `records` and its buckets_per_tile entries to `buckets`. The
  // caller has checked that rows and columns lie inside the (edge) tile. INVALID_ARGUMENT for a
  // zero, a value that is not finite or a position given twice; both vectors are then in an
  // unspecified state.
  absl::Status Encode(std::span<const TileCooTileSlot> slots, std::vector<TileCooBucket>& buckets,
                      std::vector<TileCooRecord>& records);

 private:
  struct Scratch;
  TileCooTileEncoder(const TileCooGeometry& geometry, std::unique_ptr<Scratch> scratch);

  TileCooGeometry geometry_;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace flashquant
