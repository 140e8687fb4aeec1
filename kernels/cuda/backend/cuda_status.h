// CUDA and cuBLAS errors as statuses. An error of the device itself (a fault in a kernel, a lost
// card) is INTERNAL and final: every later call fails too.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <string_view>

#include "absl/status/status.h"

namespace flashquant::cuda {

// OK for cudaSuccess; RESOURCE_EXHAUSTED for a refused allocation; INTERNAL otherwise. `what`: the
// call or op, as in "rms_norm".
absl::Status ToStatus(cudaError_t error, std::string_view what);
absl::Status ToStatus(cublasStatus_t status, std::string_view what);

}  // namespace flashquant::cuda
