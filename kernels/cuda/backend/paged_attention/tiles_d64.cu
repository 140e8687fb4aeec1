// Attention for heads of up to 64 dimensions.
#include "kernels/cuda/backend/paged_attention/decode.cuh"
#include "kernels/cuda/backend/paged_attention/wide.cuh"

namespace flashquant::cuda {

template cudaError_t LaunchTilesOfDim<64>(const PagedAttentionParams&, const AttentionWork&,
                                          cudaStream_t);
template cudaError_t LaunchDecodeOfDim<64>(const DecodeAttentionParams&, cudaStream_t);

}  // namespace flashquant::cuda
