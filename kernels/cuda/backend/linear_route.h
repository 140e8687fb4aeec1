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

}  // namespace flashquant::cuda
