// Launchers of the CUDA backend's own kernels, one per op of op_params.h; the fused INT4 linear has
// its own header, launchers.h. Activations are BF16, the KV cache BF16 or FP8, sums FP32.
//
// Pointers are device memory unless marked. Each launcher queues on `stream` and returns the launch
// error; none synchronises or allocates. No absl here: nvcc compiles this header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/op_params.h"

namespace flashquant::cuda {

// cudaSuccess when the current device can run this build's kernels.
cudaError_t HasDeviceCode();

// `table`: [vocab_size, hidden] BF16. An id outside the vocabulary gives a row of zeros.
cudaError_t LaunchEmbedding(const EmbeddingParams& params, const void* table, int64_t vocab_size,
                            int64_t hidden, cudaStream_t stream);

// The sum with the residual is rounded to BF16 before it is normalised.
cudaError_t LaunchRmsNorm(const RmsNormParams& params, cudaStream_t stream);

// The same rounding of the sum as LaunchRmsNorm.
cudaError_t LaunchLayerNorm(const LayerNormParams& params, cudaStream_t stream);
cudaError_t LaunchHeadNorm(const HeadNormParams& params, cudaStream_t stream);
cudaError_t LaunchAddPositions(const AddPositionsParams& params, cudaStream_t stream);
cudaError_t LaunchRelu(const ReluParams& params, cudaStream_t stream);

cudaError_t LaunchRopeAndKvWrite(const RopeAndKvWriteParams& params, bool fp8_cache,
                                 cudaStream_t stream);

cudaError_t LaunchSiluAndMul(const SiluAndMulParams& params, cudaStream_t stream);

cudaError_t LaunchGatherRows(const GatherRowsParams& params, cudaStream_t stream);

// y[row, :] = bias for every row: what a product with beta 1 then adds to. `y` is BF16, or FP32
// with `y_is_float`, its rows y_stride elements apart; `bias`: [n] BF16.
cudaError_t LaunchFillBias(const void* bias, int64_t num_rows, int64_t n, int64_t y_stride,
                           bool y_is_float, void* y, cudaStream_t stream);

// y[row, :] += bias, in BF16, rounded once more.
cudaError_t LaunchAddBias(const void* bias, int64_t num_rows, int64_t n, void* y,
                          cudaStream_t stream);
// to[row, :] = from[row, :] + bias; `from` BF16, `bias` [n] BF16 or null, `to` FP32.
cudaError_t LaunchWiden(const void* from, const void* bias, int64_t num_rows, int64_t n, float* to,
                        cudaStream_t stream);

// Equal in meaning to the CPU's sampling: the same filters in the same order, the same random
// number of (seed, output position). Weights are summed in fixed point (2^-40 of the largest), so
// the draw does not depend on the order of the sums. Bans write -infinity into the logits.
cudaError_t LaunchSampleTokens(const SampleTokensParams& params, cudaStream_t stream);

}  // namespace flashquant::cuda
