// Attention for heads of up to 128 dimensions.
#include "kernels/cuda/backend/paged_attention/decode.cuh"
#include "kernels/cuda/backend/paged_attention/wide.cuh"

namespace flashquant::cuda {

template cudaError_t LaunchTilesOfDim<128>(const PagedAttentionParams&, const AttentionWork&,
                                           cudaStream_t);
template cudaError_t LaunchDecodeOfDim<128>(const DecodeAttentionParams&, cudaStream_t);

}  // namespace flashquant::cuda
