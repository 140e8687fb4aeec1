// Attention tiles for heads of up to 256 dimensions.
#include "kernels/cuda/backend/paged_attention/kernel.cuh"

namespace flashquant::cuda {

template cudaError_t LaunchAttentionTiles<256>(const PagedAttentionParams&, const AttentionWork&,
                                               cudaStream_t);

}  // namespace flashquant::cuda
