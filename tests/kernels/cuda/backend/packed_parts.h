// Random INT4 layers in the packers' terms, for tests of what is built on the packed form.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/linear_w4a16/pack.h"

namespace flashquant::cuda {

inline Int4Arrays ArraysOf(const Int4Weight& weight) {
  return {.n = weight.n,
          .k = weight.k,
          .n_padded = weight.n_padded,
          .k_padded = weight.k_padded,
          .group_size = weight.group_size,
          .qweight = weight.qweight.data(),
          .scales = reinterpret_cast<const uint16_t*>(weight.scales.data()),
          .zeros = weight.symmetric ? nullptr : weight.zeros.data()};
}

inline TileCooPointers PointersOf(const TileCooMatrix* outliers) {
  if (outliers == nullptr) return {};
  return {.tile_k = outliers->geometry().tile_k,
          .tile_n = outliers->geometry().tile_n,
          .tile_indptr = outliers->arrays().tile_indptr.data(),
          .records = reinterpret_cast<const uint8_t*>(outliers->arrays().records.data())};
}

inline PackedLinear PackPart(const LinearPart& part) {
  return PackLinear(ArraysOf(*part.int4), PointersOf(part.outliers), /*num_threads=*/1);
}

}  // namespace flashquant::cuda
