// See stream_rate.h.
#include "kernels/bench/stream_rate.h"

#include "kernels/bench/device_memory.cuh"
#include "kernels/bench/graph_timer.h"

namespace flashquant::bench {

double StreamGigabytesPerSecond() {
  constexpr int64_t kBytes = int64_t{512} << 20;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return 0;
  FirstCudaError().clear();
  const double us = TimeStream(kBytes);
  return CudaFailed() || us <= 0 ? 0 : static_cast<double>(kBytes) / us * 1e-3;
}

}  // namespace flashquant::bench
