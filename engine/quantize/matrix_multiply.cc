// Both operands are copied into panels (4 rows of a, two vectors of columns of b), so that the
// inner loop reads memory in order and edges are padded with zeros instead of treated apart.
#include "engine/quantize/matrix_multiply.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "engine/quantize/multiversion.h"
#include "kernels/base/math_util.h"

namespace flashquant {
namespace {

constexpr int64_t kPanelRows = 4;
constexpr int64_t kVectorBytes = 64;
constexpr int64_t kInnerBlock = 256;   // a panel of b stays in the first-level cache
constexpr int64_t kColumnBlock = 512;  // columns of b that are copied at a time

template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float Type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
  typedef double Type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
constexpr int64_t kPanelColumns = 2 * kVectorBytes / static_cast<int64_t>(sizeof(T));

// tile[4][two vectors] = panel of a times panel of b.
template <typename T>
__attribute__((always_inline)) inline void PanelProduct(int64_t inner, const T* a, const T* b,
                                                        T* tile) {
  using Vector = typename VectorOf<T>::Type;
  Vector sum[kPanelRows][2] = {};
  const Vector* columns = reinterpret_cast<const Vector*>(b);
  for (int64_t p = 0; p < inner; ++p) {
    const Vector left = columns[2 * p];
    const Vector right = columns[2 * p + 1];
    for (int64_t i = 0; i < kPanelRows; ++i) {
      sum[i][0] += a[p * kPanelRows + i] * left;
      sum[i][1] += a[p * kPanelRows + i] * right;
    }
  }
  Vector* out = reinterpret_cast<Vector*>(tile);
  for (int64_t i = 0; i < kPanelRows; ++i) {
    out[2 * i] = sum[i][0];
    out[2 * i + 1] = sum[i][1];
  }
}

FQ_MULTIVERSION void PanelProductOf(int64_t inner, const float* a, const float* b, float* tile) {
  PanelProduct<float>(inner, a, b, tile);
}
FQ_MULTIVERSION void PanelProductOf(int64_t inner, const double* a, const double* b, double* tile) {
  PanelProduct<double>(inner, a, b, tile);
}

// Working memory of a thread; vectors need their alignment.
template <typename T>
struct Panels {
  static constexpr int64_t kColumns = kPanelColumns<T>;
  alignas(kVectorBytes) T b[kInnerBlock * kColumnBlock];
  alignas(kVectorBytes) T a[kInnerBlock * kPanelRows];
  alignas(kVectorBytes) T tile[kPanelRows * kColumns];
};

template <typename T>
void PackColumns(int64_t inner, int64_t n, const T* b, int64_t ldb, T* packed) {
  constexpr int64_t kColumns = kPanelColumns<T>;
  for (int64_t j = 0; j < n; j += kColumns) {
    const int64_t width = std::min(kColumns, n - j);
    for (int64_t p = 0; p < inner; ++p) {
      std::copy_n(b + p * ldb + j, width, packed);
      std::fill(packed + width, packed + kColumns, T{0});
      packed += kColumns;
    }
  }
}

template <typename T>
void PackRows(int64_t inner, int64_t height, StridedMatrix<T> a, T* packed) {
  for (int64_t p = 0; p < inner; ++p) {
    for (int64_t i = 0; i < kPanelRows; ++i) {
      *packed++ = i < height ? a.data[i * a.row_stride + p * a.column_stride] : T{0};
    }
  }
}

template <typename T>
void MultiplyBlock(int64_t m, int64_t n, int64_t inner, T alpha, StridedMatrix<T> a,
                   Panels<T>* panels, T* c, int64_t ldc) {
  constexpr int64_t kColumns = kPanelColumns<T>;
  for (int64_t i = 0; i < m; i += kPanelRows) {
    const int64_t height = std::min(kPanelRows, m - i);
    PackRows(inner, height, {a.data + i * a.row_stride, a.row_stride, a.column_stride}, panels->a);
    for (int64_t j = 0; j < n; j += kColumns) {
      const int64_t width = std::min(kColumns, n - j);
      PanelProductOf(inner, panels->a, panels->b + j * inner, panels->tile);
      for (int64_t row = 0; row < height; ++row) {
        T* out = c + (i + row) * ldc + j;
        const T* in = panels->tile + row * kColumns;
        for (int64_t column = 0; column < width; ++column) out[column] += alpha * in[column];
      }
    }
  }
}

template <typename T>
void MultiplyAddOf(int64_t m, int64_t n, int64_t inner, T alpha, StridedMatrix<T> a, const T* b,
                   int64_t ldb, T* c, int64_t ldc) {
  // On the heap: thread-local storage of this size comes out of every thread's stack, and the
  // metrics endpoint's threads have 100 KiB in all.
  static thread_local const auto panels = std::make_unique_for_overwrite<Panels<T>>();
  for (int64_t first = 0; first < n; first += kColumnBlock) {
    const int64_t columns = std::min(kColumnBlock, n - first);
    for (int64_t p = 0; p < inner; p += kInnerBlock) {
      const int64_t depth = std::min(kInnerBlock, inner - p);
      PackColumns(depth, columns, b + p * ldb + first, ldb, panels->b);
      MultiplyBlock(m, columns, depth, alpha,
                    {a.data + p * a.column_stride, a.row_stride, a.column_stride}, panels.get(),
                    c + first, ldc);
    }
  }
}

}  // namespace

void MultiplyAdd(int64_t m, int64_t n, int64_t inner, float alpha, StridedMatrix<float> a,
                 const float* b, int64_t ldb, float* c, int64_t ldc) {
  MultiplyAddOf(m, n, inner, alpha, a, b, ldb, c, ldc);
}

void MultiplyAdd(int64_t m, int64_t n, int64_t inner, double alpha, StridedMatrix<double> a,
                 const double* b, int64_t ldb, double* c, int64_t ldc) {
  MultiplyAddOf(m, n, inner, alpha, a, b, ldb, c, ldc);
}

}  // namespace flashquant
