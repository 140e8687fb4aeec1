// See route_bench.h: a build without CUDA.
#include "kernels/bench/route_bench.h"

namespace flashquant::bench {

bool TimeRoutes(const KernelBenchOptions& /*options*/,
                const std::function<void(const RouteTiming&)>& /*row*/, std::string* error) {
  *error = "CUDA is not in this build (FQ_ENABLE_CUDA)";
  return false;
}

}  // namespace flashquant::bench
