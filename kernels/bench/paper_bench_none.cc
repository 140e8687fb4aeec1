// See paper_bench.h: a build without CUDA.
#include "kernels/bench/no_cuda.h"
#include "kernels/bench/paper_bench.h"

namespace flashquant::bench {

bool TimePaperKernels(const KernelBenchOptions& /*options*/,
                      const std::function<void(PaperStep, const KernelTiming&)>& /*row*/,
                      std::string* error) {
  *error = kNoCuda;
  return false;
}

}  // namespace flashquant::bench
