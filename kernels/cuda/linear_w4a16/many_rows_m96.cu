// Instances of the kernel for many rows with tiles of 96 rows.
#include "kernels/cuda/linear_w4a16/many_rows_instances.h"
#include "kernels/cuda/linear_w4a16/many_rows_kernel.cuh"

namespace flashquant::cuda {

const void* ManyRowsKernelM96(int groups_per_chunk, bool has_zeros) {
  return SelectManyRows<96>(groups_per_chunk, has_zeros);
}

}  // namespace flashquant::cuda
