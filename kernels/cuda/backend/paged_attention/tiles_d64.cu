// Attention tiles for heads of up to 64 dimensions.
#include "kernels/cuda/backend/paged_attention/kernel.cuh"

namespace flashquant::cuda {

template cudaError_t LaunchAttentionTiles<64>(const PagedAttentionParams&, const AttentionWork&,
                                              cudaStream_t);

}  // namespace flashquant::cuda
