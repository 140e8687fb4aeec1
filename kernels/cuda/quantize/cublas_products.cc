#include "kernels/cuda/quantize/cublas_products.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/cuda_status.h"

namespace flashquant::cuda {
namespace {

// What cuBLAS asks for on sm_90; given once, so that no call allocates and repeats give equal bits.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

cublasOperation_t Operation(bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }

}  // namespace

absl::StatusOr<std::unique_ptr<CublasProducts>> CublasProducts::Create(Backend* backend,
                                                                       cudaStream_t stream) {
  FQ_ASSIGN_OR_RETURN(const CublasLibrary* cublas, OpenCublas());
  std::unique_ptr<CublasProducts> products(new CublasProducts(cublas));
  FQ_RETURN_IF_ERROR(ToStatus(cublas->create(&products->handle_), "cuBLAS handle"));
  FQ_RETURN_IF_ERROR(ToStatus(cublas->set_stream(products->handle_, stream), "cuBLAS stream"));
  FQ_RETURN_IF_ERROR(ToStatus(
      cublas->set_math_mode(products->handle_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
      "cuBLAS mode"));
  FQ_ASSIGN_OR_RETURN(products->workspace_, backend->Allocate(kWorkspaceBytes));
  FQ_RETURN_IF_ERROR(ToStatus(
      cublas->set_workspace(products->handle_, products->workspace_.data(), kWorkspaceBytes),
      "cuBLAS workspace"));
  return products;
}

CublasProducts::~CublasProducts() {
  if (handle_ != nullptr) cublas_->destroy(handle_);
}

absl::Status CublasProducts::Multiply(int64_t m, int64_t n, int64_t k, float alpha,
                                      ColumnMajor<const float> a, ColumnMajor<const float> b,
                                      float beta, ColumnMajor<float> c) {
  return ToStatus(
      cublas_->gemm_ex(handle_, Operation(a.transposed), Operation(b.transposed),
                       static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), &alpha,
                       a.data, CUDA_R_32F, static_cast<int>(a.stride), b.data, CUDA_R_32F,
                       static_cast<int>(b.stride), &beta, c.data, CUDA_R_32F,
                       static_cast<int>(c.stride), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
      "quantizer product");
}

absl::Status CublasProducts::Multiply(int64_t m, int64_t n, int64_t k, double alpha,
                                      ColumnMajor<const double> a, ColumnMajor<const double> b,
                                      double beta, ColumnMajor<double> c) {
  return ToStatus(
      cublas_->gemm_ex(handle_, Operation(a.transposed), Operation(b.transposed),
                       static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), &alpha,
                       a.data, CUDA_R_64F, static_cast<int>(a.stride), b.data, CUDA_R_64F,
                       static_cast<int>(b.stride), &beta, c.data, CUDA_R_64F,
                       static_cast<int>(c.stride), CUBLAS_COMPUTE_64F, CUBLAS_GEMM_DEFAULT),
      "quantizer product");
}

absl::Status CublasProducts::SelfProduct(const void* x, int64_t num_rows, int64_t k, float* c) {
  const float alpha = 1;
  const float beta = 0;
  const int size = static_cast<int>(k);
  return ToStatus(
      cublas_->gemm_ex(handle_, CUBLAS_OP_N, CUBLAS_OP_T, size, size, static_cast<int>(num_rows),
                       &alpha, x, CUDA_R_16BF, size, x, CUDA_R_16BF, size, &beta, c, CUDA_R_32F,
                       size, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
      "second moments");
}

}  // namespace flashquant::cuda
