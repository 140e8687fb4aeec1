// Instances of the fused kernel for up to 8 batch rows, weights by cp.async.
#include "kernels/cuda/linear_w4a16/instances.h"
#include "kernels/cuda/linear_w4a16/kernel.cuh"

namespace flashquant::cuda {

const void* KernelM8CpAsync(int groups_per_chunk, bool has_zeros) {
  return SelectByWeight<1, false>(groups_per_chunk, has_zeros);
}

}  // namespace flashquant::cuda
