// DenseLinear: y = x * W^T + bias for BF16 matrices through cuBLAS, FP32 sums.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/backend/cublas_library.h"

namespace flashquant::cuda {

// x: [num_rows, k] BF16; matrix: [n, k] BF16; bias: [n] BF16 or null; y: [num_rows, n], row stride
// y_stride elements.
struct DenseLinearArguments {
  int64_t num_rows = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t y_stride = 0;
  const void* x = nullptr;
  const void* matrix = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  bool y_is_float = false;  // FP32, else BF16
};

// Used from one thread, on one stream. Owns a cuBLAS handle and its workspace.
class DenseLinear final {
 public:
  // UNAVAILABLE when cuBLAS is not installed.
  static absl::StatusOr<std::unique_ptr<DenseLinear>> Create(Backend* backend, cudaStream_t stream);
  ~DenseLinear();
  DenseLinear(const DenseLinear&) = delete;
  DenseLinear& operator=(const DenseLinear&) = delete;

  absl::Status Run(const DenseLinearArguments& arguments);

 private:
  DenseLinear(const CublasLibrary* cublas, cudaStream_t stream)
      : cublas_(cublas), stream_(stream) {}

  const CublasLibrary* const cublas_;
  const cudaStream_t stream_;
  cublasHandle_t handle_ = nullptr;
  DeviceBuffer workspace_;
};

}  // namespace flashquant::cuda
