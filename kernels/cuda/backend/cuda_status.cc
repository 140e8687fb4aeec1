#include "kernels/cuda/backend/cuda_status.h"

#include "kernels/base/status_macros.h"

namespace flashquant::cuda {

absl::Status ToStatus(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // a refused allocation leaves the device usable: do not report it again
    return ResourceExhaustedError("GPU memory: {}: refused by the driver", what);
  }
  return InternalError("GPU: {}: {} ({})", what, cudaGetErrorString(error),
                       cudaGetErrorName(error));
}

absl::Status ToStatus(cublasStatus_t status, std::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return InternalError("GPU: {}: cuBLAS status {}", what, static_cast<int>(status));
}

}  // namespace flashquant::cuda
