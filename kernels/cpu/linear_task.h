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
  const float* x = nullptr;           // rows from 8 c at 8 c k_packed: [k_packed][stride]
  const int32_t* x_digits = nullptr;  // instead of x where TakesDigits(); x then serves outliers
  // kInt4: rows from 8 c at 16 c k_chunks: [k_chunks][2][stride], the sums of x over each chunk of
  // K and, with digits, what they are to be multiplied with.
  const float* x_sums = nullptr;
  int64_t k_chunks = 0;  // CeilDiv(k_packed, segment->chunk_inputs)
  float* y = nullptr;    // row 0, the layer's channel 0
  int64_t y_stride = 0;
};

// One row's x for the byte dot products of digit_tile-inl.h. `stride` is that of its rows.
struct DigitRow {
  const float* x = nullptr;  // [k]
  int64_t k = 0;
  int64_t chunk_inputs = 0;
  int64_t stride = 0;
  int32_t* digits = nullptr;  // the row's place in [k_packed / 8][even, odd][stride][4]
  float* sums = nullptr;      // the row's place in [k_chunks][2][stride]
};

// Whether this machine's INT4 kernel takes digits, and the making of them.
bool TakesDigits();
void MakeRowDigits(const DigitRow& row);

void RunInt4Task(const LinearTask& task);
void RunDenseTask(const LinearTask& task);

}  // namespace flashquant
