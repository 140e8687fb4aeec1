// Instances of the fused kernel for up to 8 batch rows, weights by bulk copies.
#include "kernels/cuda/linear_w4a16/instances.h"
#include "kernels/cuda/linear_w4a16/kernel.cuh"

namespace flashquant::cuda {

const void* KernelM8Bulk(int groups_per_chunk, bool has_zeros, bool cluster_join) {
  return cluster_join ? SelectByWeight<1, true, true>(groups_per_chunk, has_zeros)
                      : SelectByWeight<1, true>(groups_per_chunk, has_zeros);
}

}  // namespace flashquant::cuda
