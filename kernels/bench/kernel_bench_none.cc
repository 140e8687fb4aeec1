// See kernel_bench.h: a build without CUDA.
#include "kernels/bench/kernel_bench.h"
#include "kernels/bench/no_cuda.h"

namespace flashquant::bench {

bool DescribeBenchDevice(std::string* /*description*/, std::string* error) {
  *error = kNoCuda;
  return false;
}

bool TimeKernels(const KernelBenchOptions& /*options*/,
                 const std::function<void(const KernelTiming&)>& /*row*/, std::string* error) {
  *error = kNoCuda;
  return false;
}

}  // namespace flashquant::bench
