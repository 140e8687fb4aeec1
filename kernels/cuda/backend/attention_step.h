// AttentionStep: the attention work of the running step. The plan is made from the step's host
// arrays at the first layer, uploaded once and used by all layers of equal head shape.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/cuda/backend/cuda_memory.h"
#include "kernels/cuda/backend/paged_attention/params.h"

namespace flashquant::cuda {

class AttentionStep final {
 public:
  AttentionStep(Backend* backend, cudaStream_t stream) : backend_(backend), stream_(stream) {}

  // Copies the arrays that plans are made from.
  void Begin(const AttentionBatch& host_batch);

  // INVALID_ARGUMENT for heads that the kernels do not take or a batch other than Begin's.
  absl::Status Run(const PagedAttentionParams& params);

 private:
  absl::Status Plan(const PagedAttentionParams& params, int32_t group);
  // Makes room for num_bytes; what the buffer held is lost.
  absl::Status Grow(int64_t num_bytes, DeviceBuffer* buffer);

  Backend* const backend_;
  const cudaStream_t stream_;
  std::vector<int32_t> query_indptr_;
  std::vector<int32_t> context_lengths_;
  std::vector<int32_t> block_indptr_;
  // What work_ was made for; num_kv_heads 0: nothing yet in this step.
  int32_t planned_group_ = 0;
  int32_t planned_window_ = 0;
  int32_t planned_kv_heads_ = 0;
  int32_t planned_head_dim_ = 0;
  AttentionWork work_;
  DeviceBuffer items_;
  DeviceBuffer partials_;
};

}  // namespace flashquant::cuda
