// Attention for heads of up to 32 dimensions.
#include "kernels/cuda/backend/paged_attention/decode.cuh"
#include "kernels/cuda/backend/paged_attention/wide.cuh"

namespace flashquant::cuda {

template cudaError_t LaunchTilesOfDim<32>(const PagedAttentionParams&, const AttentionWork&,
                                          cudaStream_t);
template cudaError_t LaunchDecodeOfDim<32>(const DecodeAttentionParams&, cudaStream_t);

}  // namespace flashquant::cuda
