// Instances of the fused kernel for up to 32 batch rows, weights by cp.async.
#include "kernels/cuda/linear_w4a16/instances.h"
#include "kernels/cuda/linear_w4a16/kernel.cuh"

namespace flashquant::cuda {

const void* KernelM32CpAsync(int groups_per_chunk, bool has_zeros) {
  return SelectByWeight<4, false>(groups_per_chunk, has_zeros);
}

}  // namespace flashquant::cuda
