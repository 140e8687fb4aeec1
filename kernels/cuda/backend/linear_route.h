// Which way a product takes, by its number of rows: passes of the fused kernel, each of which reads
// the packed weight again; the fused kernel for many rows, where the device has it; one BF16 copy
// of the layer for cuBLAS. Host arithmetic on measured crossings; `tests/gpu/run.sh kernels
// --routes` measures them.
#pragma once

#include <cstdint>

#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

// The most rows for which each fused way is the fastest; with more than both, the copy is.
struct FusedRows {
  int32_t passes = 0;
  int32_t many_rows = 0;  // 0: the device has no such kernel
};
FusedRows ChooseFusedRows(bool has_many_rows);

// Strips of a layer to unpack and multiply at once: as many as give a BF16 copy of
// kMaxUnpackedBytes, which bounds the memory for it; at least four.
inline constexpr int64_t kMaxUnpackedBytes = int64_t{128} << 20;
int32_t UnpackStripsAtOnce(const PackedLayout& layout);

}  // namespace flashquant::cuda
