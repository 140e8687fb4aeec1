// See route_bench.h: what needs no CUDA.
#include "kernels/bench/route_bench.h"

namespace flashquant::bench {

std::vector<int> DefaultRouteRows() {
  return {33, 48, 64, 65, 96, 128, 129, 192, 256, 384, 512, 1024, 2048};
}

}  // namespace flashquant::bench
