// Canonical INT4 weight of one linear layer, as the checkpoint stores it (design "Tile-COO format",
// "Checkpoint folder"). Device-independent: each backend re-packs it once at load.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/bfloat16.h"

namespace flashquant {

// dequant(n, k) = scales[n, k / group_size] * (code(n, k) - zero(n, k / group_size)), exact in
// float32. Sizes: n, k are the true ones; n_padded (multiple of 8) and k_padded (multiple of the
// group size, of 2 for one group per row) are those of the arrays. Padding codes equal their zero
// point, padding rows have scale 0.
struct Int4Weight {
  int64_t n = 0;
  int64_t k = 0;
  int64_t n_padded = 0;
  int64_t k_padded = 0;
  int64_t group_size = 0;  // weights along K per scale; k_padded when one group per row ("-1")
  bool symmetric = false;  // zero point 8 everywhere, `zeros` empty
  std::vector<uint8_t> qweight;  // [n_padded, k_padded / 2], low nibble = even k
  std::vector<BFloat16> scales;  // [n_padded, groups_per_row()]
  std::vector<uint8_t> zeros;    // [n_padded, groups_per_row()], 0..15

  int64_t groups_per_row() const { return k_padded / group_size; }
  int32_t Code(int64_t row_n, int64_t col_k) const {
    const uint8_t byte = qweight[static_cast<size_t>(row_n * (k_padded / 2) + col_k / 2)];
    return (col_k % 2 == 0) ? (byte & 0x0f) : (byte >> 4);
  }
  int32_t ZeroPoint(int64_t row_n, int64_t group) const {
    return symmetric ? 8 : zeros[static_cast<size_t>(row_n * groups_per_row() + group)];
  }
};

// Checks the group size (32, 64, 128 or k_padded), that n and k are padded to the next multiple and
// no further, the sizes of the arrays, scales finite, zero points at most 15, padding codes equal
// to their zero point, padding rows with scale 0. DATA_LOSS otherwise. Reads all scales and zero
// points, but of the codes only the padding.
absl::Status ValidateInt4Weight(const Int4Weight& weight);

}  // namespace flashquant
