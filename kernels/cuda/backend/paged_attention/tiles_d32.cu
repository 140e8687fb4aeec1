// Attention tiles for heads of up to 32 dimensions.
#include "kernels/cuda/backend/paged_attention/kernel.cuh"

namespace flashquant::cuda {

template cudaError_t LaunchAttentionTiles<32>(const PagedAttentionParams&, const AttentionWork&,
                                              cudaStream_t);

}  // namespace flashquant::cuda
