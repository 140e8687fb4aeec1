// LinearTask: one thread's share of a linear op, and the interleaved x that the kernels read.
//
// Rows come in chunks of 8. In a chunk x is [k][row], rows padded with zeros to a stride of 1, 2, 4
// or 8, so that one input of all rows lies together: a dense kernel broadcasts from one cache line,
// an outlier takes all rows with one load.
#pragma once

#include <cstdint>

#include "kernels/cpu/packed_linear.h"

namespace flashquant {

inline constexpr int64_t kRowsPerChunk = 8;

// Rows of a chunk in memory, for 1 to 8 real ones.
constexpr int64_t RowStride(int64_t num_rows) {
  return num_rows <= 2 ? num_rows : (num_rows <= 4 ? 4 : 8);
}

// Output channels of blocks [first_block, end_block) for rows [first_row, end_row); first_row is a
// multiple of 8.
struct LinearTask {
  const PackedSegment* segment = nullptr;
  int64_t k_packed = 0;
  int64_t num_tiles = 0;
  int64_t first_block = 0;
  int64_t end_block = 0;
  int64_t first_row = 0;
  int64_t end_row = 0;
  const float* x = nullptr;       // chunk c at 8 c k_packed: [k_packed][stride]
  const float* x_sums = nullptr;  // kInt4: sums of x over each chunk of K; at 8 c k_chunks
  int64_t k_chunks = 0;           // CeilDiv(k_packed, segment->chunk_inputs)
  float* y = nullptr;             // row 0, the layer's channel 0
  int64_t y_stride = 0;
};

void RunInt4Task(const LinearTask& task);
void RunDenseTask(const LinearTask& task);

}  // namespace flashquant
