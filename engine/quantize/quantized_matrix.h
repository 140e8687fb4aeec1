// What quantizing one linear layer gives: the dense INT4 part and the list of outliers, and the way
// from codes and masks by row to it. Encoding to Tile-COO is kernels/format/tile_coo_encoder.h.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/quantize/int4_quantizer.h"
#include "kernels/format/int4_weight.h"
#include "kernels/format/tile_coo_encoder.h"
#include "kernels/quantizer_ops.h"

namespace flashquant {

struct QuantizedMatrix {
  Int4Weight weight;
  // By n, then k; never zero. In every (tile, column) their number is a multiple of four, but for
  // outliers that turned out to be zero.
  std::vector<TileCooSlot> outliers;
  double energy = 0;         // sum of squared weights
  double error_without = 0;  // sum of squared errors of the best INT4 without outliers; negative:
                             // not known
  double error_with = 0;     // the same as stored, with outliers
  // With calibration: squared output errors over the calibration tokens, and what the layer's
  // outputs themselves come to. Negative without.
  double output_error = -1;
  double output_energy = -1;
};

// A quantized matrix while it is made.
struct MatrixState {
  int64_t n = 0;
  int64_t k = 0;
  int64_t group_size = 0;  // one group per row: k rounded up to 2
  bool symmetric = false;
  std::vector<GroupParams> params;  // [n, groups per row]
  std::vector<uint8_t> codes;       // [n, k]; at an outlier it does not matter
  std::vector<uint8_t> mask;        // [n, k], 1 = outlier
  std::vector<float> values;        // [n, k] read at outliers only; rounded to BF16

  int64_t groups_per_row() const { return (k + group_size - 1) / group_size; }
};

// `weight` and `outliers`, "replace" semantics; the sums are the caller's. Here and below, the same
// for any num_threads.
QuantizedMatrix MakeQuantizedMatrix(const MatrixState& state, int num_threads = 1);
// The same of `rows` that solve `problem`.
QuantizedMatrix MakeQuantizedMatrix(const RowsProblem& problem, const SolvedRows& rows,
                                    int num_threads);

// The matrix [n, k] that dense part and outliers stand for.
std::vector<float> Dequantize(const QuantizedMatrix& matrix, int num_threads = 1);

}  // namespace flashquant
