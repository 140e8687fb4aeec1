// See route_bench.h: a build without CUDA.
#include "kernels/bench/no_cuda.h"
#include "kernels/bench/route_bench.h"

namespace flashquant::bench {

bool TimeRoutes(const KernelBenchOptions& /*options*/,
                const std::function<void(const RouteTiming&)>& /*row*/, std::string* error) {
  *error = kNoCuda;
  return false;
}

}  // namespace flashquant::bench
