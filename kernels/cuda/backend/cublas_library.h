// cuBLAS, opened at run time: a program that serves from the CPU needs no copy of it, and linked in
// it would take some 100 KiB of every thread's stack for its thread-local storage, which is all
// that the metrics endpoint's threads have.
#pragma once

#include <cublas_v2.h>

#include "absl/status/statusor.h"

namespace flashquant::cuda {

// The functions that we call. Lives as long as the process.
struct CublasLibrary {
  decltype(&::cublasCreate_v2) create = nullptr;
  decltype(&::cublasDestroy_v2) destroy = nullptr;
  decltype(&::cublasSetStream_v2) set_stream = nullptr;
  decltype(&::cublasSetWorkspace_v2) set_workspace = nullptr;
  decltype(&::cublasSetMathMode) set_math_mode = nullptr;
  // Overloaded in the header, so its type is written out.
  cublasStatus_t (*gemm_ex)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                            const void*, const void*, cudaDataType, int, const void*, cudaDataType,
                            int, const void*, void*, cudaDataType, int, cublasComputeType_t,
                            cublasGemmAlgo_t) = nullptr;
};

// Opens the library of the toolkit's major version that this was built with, once. UNAVAILABLE when
// it is not there.
absl::StatusOr<const CublasLibrary*> OpenCublas();

}  // namespace flashquant::cuda
