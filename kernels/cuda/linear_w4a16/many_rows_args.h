// Arguments of the kernel for many rows; how the work is cut is in many_rows_plan.h.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/linear_w4a16/many_rows_plan.h"

namespace flashquant::cuda {

struct ManyRowsArgs {
  CUtensorMap x;  // [m, k] in boxes of kRows x kHalfFeatures, 16-byte pieces exchanged by row % 8
  __nv_bfloat16* y;
  int64_t y_stride;
  int32_t m;
  int32_t n;
  int32_t num_strips;
  int32_t num_units;  // of a strip
  int32_t row_tiles;  // of the same channels; they follow each other
  EvenSplit units;    // of all tiles, over blocks
  const uint8_t* dense;
  const OutlierRef* outlier_index;  // nullptr: no outliers
  const uint8_t* outliers;
  uint32_t unit_dense_bytes;
  float* workspace;    // [block][2][kRows * kTileN]: sums of a block's first and last tile
  uint32_t* counters;  // [tile], zero before and after
  ManyRowsLayout shared;
};

}  // namespace flashquant::cuda
