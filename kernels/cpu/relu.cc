// ReLU, in place.
#include <algorithm>

#include "kernels/cpu/cpu_kernels.h"

namespace flashquant {

void ReluCpu(const ReluParams& params, ThreadPool& pool) {
  constexpr int64_t kPerTask = 8192;
  auto* x = static_cast<float*>(params.x);
  pool.ParallelFor(CeilDiv(params.count, kPerTask), [&](int64_t task, int32_t /*thread*/) {
    const int64_t end = std::min(params.count, (task + 1) * kPerTask);
    for (int64_t i = task * kPerTask; i < end; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
  });
}

}  // namespace flashquant
