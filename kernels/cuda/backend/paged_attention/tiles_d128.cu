// Attention tiles for heads of up to 128 dimensions.
#include "kernels/cuda/backend/paged_attention/kernel.cuh"

namespace flashquant::cuda {

template cudaError_t LaunchAttentionTiles<128>(const PagedAttentionParams&, const AttentionWork&,
                                               cudaStream_t);

}  // namespace flashquant::cuda
