// Turns a weight in the fused kernel's form into a BF16 matrix, for products with more rows than
// the fused kernel is for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/backend/unpack_tables.h"
#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

// Strips of kStripN channels; the layer's last one may have fewer channels.
struct StripRange {
  int32_t first = 0;
  int32_t count = 0;  // at most 65535
};

// matrix = dequant(W_Q) + W_O of the strips' channels, row-major BF16 [channels, layout.k]; one
// rounding, and a second where an outlier is added to a code that is not its zero point. k is a
// multiple of 8, `matrix` 16-byte aligned. `weight`: layout.num_bytes, `tables`: both in device
// memory. Queues on `stream`.
cudaError_t LaunchUnpackWeight(const PackedLayout& layout, const uint8_t* weight,
                               const UnpackTables* tables, const StripRange& strips, void* matrix,
                               cudaStream_t stream);

}  // namespace flashquant::cuda
