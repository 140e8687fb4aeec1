// What the attention kernels read besides the op's params, and their launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/work.h"
#include "kernels/op_params.h"

namespace flashquant::cuda {

// All in device memory.
struct AttentionWork {
  const AttentionItem* narrow = nullptr;
  const AttentionItem* wide = nullptr;
  const AttentionJoin* joins = nullptr;
  int32_t num_narrow = 0;
  int32_t num_wide = 0;
  int32_t num_joins = 0;
  // [num_partials][num_kv_heads][kNarrowRows][head_dim]: sums of weight * value.
  float* partial_sums = nullptr;
  // [num_partials][num_kv_heads][kNarrowRows][2]: the greatest score (in powers of two) and the
  // sum of weights relative to it.
  float* partial_weights = nullptr;
};

// Queues the tiles, then the joins. head_dim even, 2 to kMaxHeadDim. A row's bits depend on its own
// keys and on whether it is the only row of its sequence in the step, not on other rows.
cudaError_t LaunchPagedAttention(const PagedAttentionParams& params, const AttentionWork& work,
                                 cudaStream_t stream);

// Parts of LaunchPagedAttention, one source file each. kPaddedDim: 32, 64, 96, 128 or 256, at least
// head_dim.
template <int kPaddedDim>
cudaError_t LaunchAttentionTiles(const PagedAttentionParams& params, const AttentionWork& work,
                                 cudaStream_t stream);
cudaError_t LaunchAttentionJoins(const PagedAttentionParams& params, const AttentionWork& work,
                                 cudaStream_t stream);

}  // namespace flashquant::cuda
