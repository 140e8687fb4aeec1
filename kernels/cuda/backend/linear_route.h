// Which way a product takes, by its number of rows: passes of the fused kernel, each of which reads
// the packed weight again, or one BF16 copy of the layer for cuBLAS. Host arithmetic on a table of
// measured crossings; `tests/gpu/run.sh kernels --routes` measures them.
#pragma once

#include <cstdint>

#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

// The most rows for which passes of the fused kernel are the faster way on a device of compute
// capability `major`.x.
int32_t MaxPassRows(int32_t major, const PackedLayout& layout);

// Strips of a layer to unpack and multiply at once: as many as give a BF16 copy of
// kMaxUnpackedBytes, which bounds the memory for it; at least four.
inline constexpr int64_t kMaxUnpackedBytes = int64_t{128} << 20;
int32_t UnpackStripsAtOnce(const PackedLayout& layout);

}  // namespace flashquant::cuda
