// Attention tiles for heads of up to 96 dimensions.
#include "kernels/cuda/backend/paged_attention/kernel.cuh"

namespace flashquant::cuda {

template cudaError_t LaunchAttentionTiles<96>(const PagedAttentionParams&, const AttentionWork&,
                                              cudaStream_t);

}  // namespace flashquant::cuda
