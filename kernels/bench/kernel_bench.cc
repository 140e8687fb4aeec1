// See kernel_bench.h: what needs no CUDA.
#include "kernels/bench/kernel_bench.h"

#include <cmath>

namespace flashquant::bench {

std::vector<KernelShape> DefaultKernelShapes() {
  return {{4096, 4096},  {4096, 6144},  {4096, 28672}, {14336, 4096},
          {5120, 27648}, {13824, 5120}, {14848, 75264}};
}

double GeometricMean(const std::vector<double>& values) {
  double sum = 0;
  int count = 0;
  for (const double value : values) {
    if (value <= 0) continue;
    sum += std::log(value);
    ++count;
  }
  return count == 0 ? 0 : std::exp(sum / count);
}

}  // namespace flashquant::bench
