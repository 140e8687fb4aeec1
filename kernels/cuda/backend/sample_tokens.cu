// Sampling: penalties and biases, temperature, top-k, top-p, min-p, one seeded draw per row, and
// logprobs; one block a row. The parts are in sampling/.
#include <cstdint>

#include "kernels/cuda/backend/op_launchers.h"
#include "kernels/cuda/backend/sampling/block.cuh"
#include "kernels/cuda/backend/sampling/row_draw.cuh"
#include "kernels/cuda/backend/sampling/row_logits.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"

namespace flashquant::cuda {
namespace {

// Grid: a row each. A row that asks for logprobs is drawn in a copy, because they are those of the
// logits as they came in.
__global__ void __launch_bounds__(kThreads) SampleTokensKernel(SampleTokensParams params) {
  extern __shared__ uint64_t dynamic_shared[];
  SamplingShared& shared = *reinterpret_cast<SamplingShared*>(dynamic_shared);
  BeginDependent();
  const int64_t row = blockIdx.x;
  const int64_t offset = row * params.vocab_size;
  const SampleRow sample_row = params.rows[row];
  RowLogits logits(params.logits + offset, params.vocab_size, shared);
  bool finite = true;
  const int32_t best = logits.Best(&finite);
  if (threadIdx.x == 0) params.non_finite[row] = finite ? 0 : 1;
  if (!finite) {
    if (threadIdx.x == 0) params.token_ids[row] = 0;
    return;
  }
  const bool logprobs = sample_row.top_logprobs >= 0;
  float* const drawn = (logprobs ? params.scratch : params.logits) + offset;
  if (logprobs) logits.CopyTo(drawn);
  RowLogits changed(drawn, params.vocab_size, shared);
  const bool any_change = changed.Change(params, sample_row);
  const int32_t best_drawn = any_change ? changed.Best(&finite) : best;
  RowDraw draw(sample_row, drawn, params.vocab_size, shared);
  const int32_t token = draw.Draw(best_drawn);
  if (threadIdx.x == 0) params.token_ids[row] = token;
  if (!logprobs) return;
  logits.WriteLogprobs(token, best, sample_row.top_logprobs,
                       params.logprobs + row * kLogprobsPerRow);
}

}  // namespace

cudaError_t LaunchSampleTokens(const SampleTokensParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  static const cudaError_t kAttributeError = cudaFuncSetAttribute(
      SampleTokensKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SamplingShared));
  if (kAttributeError != cudaSuccess) return kAttributeError;
  return LaunchDependent(SampleTokensKernel, dim3(static_cast<unsigned>(params.num_rows)), kThreads,
                         sizeof(SamplingShared), stream, params);
}

}  // namespace flashquant::cuda
