// See paper_bench.h: a build without CUDA.
#include "kernels/bench/paper_bench.h"

namespace flashquant::bench {

bool TimePaperKernels(const KernelBenchOptions& /*options*/,
                      const std::function<void(PaperStep, const KernelTiming&)>& /*row*/,
                      std::string* error) {
  *error = "CUDA is not in this build (FQ_ENABLE_CUDA)";
  return false;
}

}  // namespace flashquant::bench
