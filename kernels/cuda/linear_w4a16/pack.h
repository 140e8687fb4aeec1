// Host packer: canonical INT4 arrays + Tile-COO outliers -> the kernel's form (packed_format.h).
// Reference for the device packer and used where load time does not matter. Takes plain pointers to
// arrays that the format's validators have accepted; checks nothing again.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

// The arrays of an Int4Weight (kernels/format/int4_weight.h), by pointer.
struct Int4Arrays {
  int64_t n = 0;
  int64_t k = 0;
  int64_t n_padded = 0;
  int64_t k_padded = 0;
  int64_t group_size = 0;            // 32, 64, 128 or k_padded
  const uint8_t* qweight = nullptr;  // [n_padded, k_padded / 2], low nibble = even k
  const uint16_t* scales = nullptr;  // BF16 bits [n_padded, k_padded / group_size]
  const uint8_t* zeros = nullptr;    // same shape, 0..15; nullptr when symmetric
};

// The arrays of a TileCooMatrix (kernels/format/tile_coo.h) with BF16 values, either column mode.
struct TileCooPointers {
  int32_t tile_k = 0;
  int32_t tile_n = 0;
  const uint32_t* tile_indptr = nullptr;  // nullptr: no outliers at all
  const uint8_t* records = nullptr;       // 16 bytes each: rows, columns, values
};

struct PackedLinear {
  PackedLayout layout;
  std::vector<uint8_t> bytes;
};

// Where the parts of a layout begin, from its numbers of strips and units.
void SetOffsets(PackedLayout* layout);

// Sizes of everything but the outliers, whose parts follow `index_offset`.
PackedLayout DenseLayout(const Int4Arrays& weight);

// Packs one layer. `num_threads` >= 1. The result depends only on the arrays.
PackedLinear PackLinear(const Int4Arrays& weight, const TileCooPointers& outliers, int num_threads);

}  // namespace flashquant::cuda
