// Matrix products of the calibrated quantizer: Hessians, their factors, error propagation.
//
// One thread; callers share out tiles of the result. An element of the result is summed in an order
// that depends on nothing but the inner dimension, so it does not matter how it is tiled.
#pragma once

#include <cstdint>

namespace flashquant {

// Element (i, p) is data[i * row_stride + p * column_stride].
template <typename T>
struct StridedMatrix {
  const T* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// c[m, n] += alpha * a[m, inner] * b[inner, n]; rows of b and c are `ldb` and `ldc` elements apart.
void MultiplyAdd(int64_t m, int64_t n, int64_t inner, float alpha, StridedMatrix<float> a,
                 const float* b, int64_t ldb, float* c, int64_t ldc);
void MultiplyAdd(int64_t m, int64_t n, int64_t inner, double alpha, StridedMatrix<double> a,
                 const double* b, int64_t ldb, double* c, int64_t ldc);

}  // namespace flashquant
