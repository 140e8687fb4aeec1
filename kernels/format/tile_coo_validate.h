// The rules of Tile-COO that a kernel relies on: every one is checked once, on the CPU, before a
// matrix exists (design "Tile-COO format" 8.6).
//
// Header fields, checksums, gaps and tail padding belong to the stand-alone file (tile_coo_file.h);
// in a checkpoint the container has its own.
#pragma once

#include "absl/status/status.h"
#include "kernels/format/int4_weight.h"
#include "kernels/format/tile_coo.h"

namespace flashquant {

// Checks 8.1 and 8.2: K and N 1..2^31-1, tile sizes 64, 128 or 256, 8, 16, 32 or 64 buckets, known
// enumerators. DATA_LOSS with the field, its value and what is allowed.
absl::Status ValidateTileCooGeometry(const TileCooGeometry& geometry);

// Checks the geometry and every rule of 8.6 on the arrays: sizes, prefix sums, tile limit, rows and
// columns inside the matrix (null slots too), one column per record in shared mode, no column in
// two buckets of a tile, no position twice, values finite and not -0. Each record is read twice at
// most; the memory used does not depend on the arrays. DATA_LOSS with tile, bucket, value and
// limit. Thread-safe.
//
// Choice: an order hint is never checked against the slots, and a record of four null slots is
// accepted. Not checked here, because only the file holds them: maxima and slot counts.
absl::Status ValidateTileCoo(const TileCooGeometry& geometry, const TileCooArrays& arrays);

// Checks the outliers against the dense weight that they correct, after ValidateInt4Weight on that
// weight: same K and N, quantization groups that divide tile_k (or one group per row), and in
// replace mode a dense code equal to the zero point at every non-null slot. DATA_LOSS otherwise.
absl::Status ValidateOutliersAgainstInt4(const Int4Weight& weight, const TileCooMatrix& matrix);

}  // namespace flashquant
