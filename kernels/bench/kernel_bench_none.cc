// See kernel_bench.h: a build without CUDA.
#include "kernels/bench/kernel_bench.h"

namespace flashquant::bench {

bool DescribeBenchDevice(std::string* /*description*/, std::string* error) {
  *error = "CUDA is not in this build (FQ_ENABLE_CUDA)";
  return false;
}

bool TimeKernels(const KernelBenchOptions& /*options*/,
                 const std::function<void(const KernelTiming&)>& /*row*/, std::string* error) {
  *error = "CUDA is not in this build (FQ_ENABLE_CUDA)";
  return false;
}

}  // namespace flashquant::bench
