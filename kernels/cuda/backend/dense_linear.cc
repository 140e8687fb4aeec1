#include "kernels/cuda/backend/dense_linear.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/cuda_status.h"
#include "kernels/cuda/backend/op_launchers.h"

namespace flashquant::cuda {
namespace {

// What cuBLAS asks for on sm_90; given once, so that no call allocates and repeats give equal bits.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<DenseLinear>> DenseLinear::Create(Backend* backend,
                                                                 cudaStream_t stream) {
  FQ_ASSIGN_OR_RETURN(const CublasLibrary* cublas, OpenCublas());
  std::unique_ptr<DenseLinear> linear(new DenseLinear(cublas, stream));
  FQ_RETURN_IF_ERROR(ToStatus(cublas->create(&linear->handle_), "cuBLAS handle"));
  FQ_RETURN_IF_ERROR(ToStatus(cublas->set_stream(linear->handle_, stream), "cuBLAS stream"));
  // Sums of split products stay FP32 too.
  FQ_RETURN_IF_ERROR(ToStatus(
      cublas->set_math_mode(linear->handle_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
      "cuBLAS mode"));
  FQ_ASSIGN_OR_RETURN(linear->workspace_, backend->Allocate(kWorkspaceBytes));
  FQ_RETURN_IF_ERROR(
      ToStatus(cublas->set_workspace(linear->handle_, linear->workspace_.data(), kWorkspaceBytes),
               "cuBLAS workspace"));
  return linear;
}

DenseLinear::~DenseLinear() {
  if (handle_ != nullptr) cublas_->destroy(handle_);
}

absl::Status DenseLinear::Run(const DenseLinearArguments& arguments) {
  // The bias is put where the product is added to: one rounding, not two.
  if (arguments.bias != nullptr) {
    FQ_RETURN_IF_ERROR(
        ToStatus(LaunchFillBias(arguments.bias, arguments.num_rows, arguments.n, arguments.y_stride,
                                arguments.y_is_float, arguments.y, stream_),
                 "linear bias"));
  }
  const float alpha = 1.0f;
  const float beta = arguments.bias != nullptr ? 1.0f : 0.0f;
  const auto m = static_cast<int>(arguments.num_rows);
  const auto n = static_cast<int>(arguments.n);
  const auto k = static_cast<int>(arguments.k);
  // Row-major y [m, n] is column-major [n, m]: cuBLAS sees W (transposed) times x.
  return ToStatus(
      cublas_->gemm_ex(handle_, CUBLAS_OP_T, CUBLAS_OP_N, n, m, k, &alpha, arguments.matrix,
                       CUDA_R_16BF, k, arguments.x, CUDA_R_16BF, k, &beta, arguments.y,
                       arguments.y_is_float ? CUDA_R_32F : CUDA_R_16BF,
                       static_cast<int>(arguments.y_stride), CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT),
      "linear");
}

}  // namespace flashquant::cuda
