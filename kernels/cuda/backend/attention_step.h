// AttentionStep: the attention work of the running step. The tiles of sequences with several query
// rows are planned from the step's host arrays at the first layer, uploaded once and used by all
// layers of equal head shape. A decode step has none: its launches depend on nothing but the number
// of sequences, so that they can be recorded.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/cuda/backend/cuda_device.h"
#include "kernels/cuda/backend/cuda_memory.h"
#include "kernels/cuda/backend/paged_attention/params.h"

namespace flashquant::cuda {

class AttentionStep final {
 public:
  // `fp8_cache`: else BF16.
  AttentionStep(Backend* backend, cudaStream_t stream, const DeviceProperties& device,
                bool fp8_cache)
      : backend_(backend),
        stream_(stream),
        cluster_(device.compute_major >= 9),
        num_sms_(device.num_multiprocessors),
        shared_bytes_(device.shared_bytes_per_block),
        fp8_cache_(fp8_cache) {}

  // Copies the arrays that plans are made from.
  void Begin(const AttentionBatch& host_batch);
  // Whether no sequence has more than one query row.
  bool IsDecode() const { return is_decode_; }

  // `cos_sin`: null, or in a decode step what rotates q and the new keys and writes the cache, as
  // in DecodeAttentionParams. INVALID_ARGUMENT for heads that the kernels do not take or a batch
  // other than Begin's.
  absl::Status Run(const PagedAttentionParams& params, const float* cos_sin);

 private:
  absl::Status Check(const PagedAttentionParams& params) const;
  absl::Status RunSingleRows(const PagedAttentionParams& params, const float* cos_sin);
  absl::Status Plan(const PagedAttentionParams& params, int32_t group);
  // Makes room for num_bytes; what the buffer held is lost.
  absl::Status Grow(int64_t num_bytes, DeviceBuffer* buffer);

  Backend* const backend_;
  const cudaStream_t stream_;
  const bool cluster_;  // the device has thread block clusters
  const int num_sms_;
  const int shared_bytes_;  // of a block, at most
  const bool fp8_cache_;
  std::vector<int32_t> query_indptr_;
  std::vector<int32_t> context_lengths_;
  std::vector<int32_t> block_indptr_;
  bool is_decode_ = false;
  // What work_ was made for; num_kv_heads 0: nothing yet in this step.
  int32_t planned_group_ = 0;
  int32_t planned_window_ = 0;
  int32_t planned_kv_heads_ = 0;
  int32_t planned_head_dim_ = 0;
  AttentionWork work_;
  int32_t num_single_rows_ = 0;
  DeviceBuffer items_;
  DeviceBuffer partials_;
};

}  // namespace flashquant::cuda
