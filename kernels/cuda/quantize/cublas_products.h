// CublasProducts: matrix products of the quantizer through cuBLAS, which counts columns first: a
// row-major matrix [rows, columns] is its [columns x rows] with the row's length as stride.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/backend/cublas_library.h"

namespace flashquant::cuda {

// A column-major operand in device memory.
template <typename T>
struct ColumnMajor {
  T* data = nullptr;
  int64_t stride = 0;
  bool transposed = false;  // not of results
};

// One stream. Owns a cuBLAS handle and its workspace. The same call on the same card gives the same
// bits.
class CublasProducts final {
 public:
  // UNAVAILABLE when cuBLAS is not installed.
  static absl::StatusOr<std::unique_ptr<CublasProducts>> Create(Backend* backend,
                                                                cudaStream_t stream);
  ~CublasProducts();
  CublasProducts(const CublasProducts&) = delete;
  CublasProducts& operator=(const CublasProducts&) = delete;

  // c [m x n] = alpha * a [m x k] * b [k x n] + beta * c, in FP32 or FP64 throughout.
  absl::Status Multiply(int64_t m, int64_t n, int64_t k, float alpha, ColumnMajor<const float> a,
                        ColumnMajor<const float> b, float beta, ColumnMajor<float> c);
  absl::Status Multiply(int64_t m, int64_t n, int64_t k, double alpha, ColumnMajor<const double> a,
                        ColumnMajor<const double> b, double beta, ColumnMajor<double> c);
  // c [k, k] FP32 = x^T x for BF16 rows x [num_rows, k].
  absl::Status SelfProduct(const void* x, int64_t num_rows, int64_t k, float* c);

 private:
  explicit CublasProducts(const CublasLibrary* cublas) : cublas_(cublas) {}

  const CublasLibrary* const cublas_;
  cublasHandle_t handle_ = nullptr;
  DeviceBuffer workspace_;
};

}  // namespace flashquant::cuda
