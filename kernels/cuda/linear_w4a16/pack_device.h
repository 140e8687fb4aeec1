// Device packer: the same bytes as PackLinear (pack.h), from canonical arrays in device memory. Two
// steps, because the size of the outlier part is known only after counting.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/linear_w4a16/pack.h"
#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

// Device memory that a layer needs while it is packed.
int64_t DevicePackScratchBytes(const Int4Arrays& weight);

// First step: counts outliers, leaves the index in `scratch` (DevicePackScratchBytes, 16-byte
// aligned) and returns the layout. All pointers of `weight` and `outliers` are device pointers,
// records 16-byte aligned. Waits for `stream`. Errors of the runtime as they come.
cudaError_t LayOutOnDevice(const Int4Arrays& weight, const TileCooPointers& outliers, void* scratch,
                           cudaStream_t stream, PackedLayout* layout);

// Second step: queues the packing into `out` (layout.num_bytes, 16-byte aligned). `scratch` as the
// first step left it; arrays and scratch must live until the stream has got there.
cudaError_t PackOnDevice(const Int4Arrays& weight, const TileCooPointers& outliers,
                         const PackedLayout& layout, const void* scratch, uint8_t* out,
                         cudaStream_t stream);

}  // namespace flashquant::cuda
