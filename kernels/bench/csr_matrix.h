// Outliers as compressed sparse rows, the form of general sparse libraries.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/linear_w4a16/pack.h"

namespace flashquant::bench {

struct CsrMatrix {
  int64_t rows = 0;     // output features
  int64_t columns = 0;  // input features
  std::vector<int32_t> row_begin;
  std::vector<int32_t> column;  // rising in each row
  std::vector<uint16_t> value;  // BF16 bits
};

// The slots of a Tile-COO matrix with k input and n output features, without the null ones.
CsrMatrix ToCsr(const cuda::TileCooPointers& outliers, int64_t k, int64_t n);

}  // namespace flashquant::bench
