// The stand-alone Tile-COO file (.tcoo): a 256-byte header, then the three arrays, for kernel tests
// and exchange with other programs (design "Tile-COO format" 8.5). A checkpoint keeps the arrays in
// safetensors instead and does not use this.
//
// Works on bytes in memory; reading and writing files is the caller's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/int4_weight.h"
#include "kernels/format/tile_coo.h"

namespace flashquant {

// What the header says beside the geometry. In an accepted file all of it is checked against the
// arrays, except real and filler (only their sum) and dense_hash.
struct TileCooFileHeader {
  uint16_t version_minor = 0;
  // As stored: in a minor above 0 it may be unknown, and the geometry then says kNone.
  uint8_t stored_order_hint = 0;
  uint32_t flags = 0;
  TileCooSlotCounts counts;
  uint64_t num_records = 0;
  uint64_t file_bytes = 0;
  uint32_t max_tile_records = 0;
  uint32_t max_bucket_records = 0;
  uint64_t dense_hash = 0;  // 0 = unchecked
  uint32_t arrays_crc32c = 0;
  uint32_t header_crc32c = 0;
};

struct TileCooFile {
  TileCooFileHeader header;
  TileCooMatrix matrix;
};

// Parses and checks a whole file: the header field by field, both checksums, gaps, tail padding,
// and every array rule of ValidateTileCoo. Nothing is allocated before the sizes are known to be
// those of `bytes`. Higher minor versions are read as 8.5 says: reserved bytes, an unknown order
// hint and bytes after the tail padding are ignored, nothing else.
// UNIMPLEMENTED for another major version or an unknown must-understand flag, DATA_LOSS with the
// field, found and allowed value for anything else. Thread-safe.
absl::StatusOr<TileCooFile> ParseTileCooFile(std::span<const uint8_t> bytes);

// The file of a matrix, version 1.0: the same input gives the same bytes. `counts` is what the
// encoder counted; `dense_hash` 0 leaves the INT4 tensors unchecked. INVALID_ARGUMENT when the
// counts do not add up to the stored slots or the null count is not that of the bytes.
absl::StatusOr<std::vector<uint8_t>> SerializeTileCooFile(const TileCooMatrix& matrix,
                                                          const TileCooSlotCounts& counts,
                                                          uint64_t dense_hash);

// CRC-32C(qweight) * 2^32 + CRC-32C(scales, then zeros), over the arrays as they are, padding
// included; a result of 0 becomes 1.
uint64_t DenseHash(const Int4Weight& weight);

// Checks a file together with its INT4 tensors: dense_hash when it is not 0, then
// ValidateOutliersAgainstInt4. DATA_LOSS otherwise.
absl::Status ValidateTileCooFileAgainstInt4(const TileCooFile& file, const Int4Weight& weight);

}  // namespace flashquant
