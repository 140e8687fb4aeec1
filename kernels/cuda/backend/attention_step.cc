#include "kernels/cuda/backend/attention_step.h"

#include <algorithm>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/cuda_status.h"
#include "kernels/cuda/backend/paged_attention/plan.h"

namespace flashquant::cuda {
namespace {

template <typename T>
int64_t Bytes(const std::vector<T>& items) {
  return static_cast<int64_t>(items.size() * sizeof(T));
}

}  // namespace

void AttentionStep::Begin(const AttentionBatch& host_batch) {
  const auto num_sequences = static_cast<size_t>(host_batch.num_sequences);
  query_indptr_.assign(host_batch.query_indptr, host_batch.query_indptr + num_sequences + 1);
  block_indptr_.assign(host_batch.block_indptr, host_batch.block_indptr + num_sequences + 1);
  context_lengths_.assign(host_batch.context_lengths, host_batch.context_lengths + num_sequences);
  planned_kv_heads_ = 0;
  is_decode_ = true;
  for (size_t i = 0; i < num_sequences; ++i) {
    is_decode_ = is_decode_ && query_indptr_[i + 1] - query_indptr_[i] <= 1;
  }
}

absl::Status AttentionStep::Check(const PagedAttentionParams& params) const {
  if (params.num_kv_heads < 1 || params.num_heads % params.num_kv_heads != 0) {
    return InvalidArgumentError("attention: {} query heads do not share {} KV heads evenly",
                                params.num_heads, params.num_kv_heads);
  }
  if (params.head_dim < 2 || params.head_dim > kMaxHeadDim || params.head_dim % 2 != 0) {
    return InvalidArgumentError("attention: head dimension {}; even, 2 to {}", params.head_dim,
                                kMaxHeadDim);
  }
  if (fp8_cache_ && params.head_dim % kFp8DimMultiple != 0) {
    return InvalidArgumentError(
        "attention: head dimension {} with an FP8 KV cache; a multiple of {} (--kv-cache-dtype "
        "bf16 takes any)",
        params.head_dim, kFp8DimMultiple);
  }
  if (static_cast<size_t>(params.batch.num_sequences) != context_lengths_.size()) {
    return InvalidArgumentError("attention: {} sequences, planned for {}",
                                params.batch.num_sequences, context_lengths_.size());
  }
  return absl::OkStatus();
}

absl::Status AttentionStep::Run(const PagedAttentionParams& params, const float* cos_sin) {
  FQ_RETURN_IF_ERROR(Check(params));
  if (params.batch.num_sequences == 0) return absl::OkStatus();
  if (is_decode_) return RunSingleRows(params, cos_sin);
  const int32_t group = params.num_heads / params.num_kv_heads;
  if (planned_kv_heads_ != params.num_kv_heads || planned_group_ != group ||
      planned_head_dim_ != params.head_dim || planned_window_ != params.sliding_window) {
    FQ_RETURN_IF_ERROR(Plan(params, group));
  }
  if (num_single_rows_ > 0) FQ_RETURN_IF_ERROR(RunSingleRows(params, nullptr));
  return ToStatus(LaunchAttentionTiles(params, work_, stream_), "paged attention");
}

absl::Status AttentionStep::RunSingleRows(const PagedAttentionParams& params,
                                          const float* cos_sin) {
  DecodeAttentionParams decode;
  decode.attention = params;
  decode.cos_sin = cos_sin;
  decode.fp8_cache = fp8_cache_;
  const int group = params.num_heads / params.num_kv_heads;
  decode.split =
      SplitDecode(int64_t{params.batch.num_sequences} * NumDecodeTiles(params), num_sms_, cluster_,
                  TakesDoubleBlocks(params.head_dim, group, fp8_cache_, shared_bytes_));
  if (!cluster_) {
    const int64_t num_floats = DecodePartialFloats(params, decode.split.ranks);
    FQ_RETURN_IF_ERROR(Grow(num_floats * int64_t{sizeof(float)}, &partials_));
    decode.partial_sums = partials_.As<float>();
    decode.partial_weights =
        decode.partial_sums + num_floats / (params.head_dim + 2) * params.head_dim;
  }
  return ToStatus(LaunchDecodeAttention(decode, stream_), "decode attention");
}

absl::Status AttentionStep::Plan(const PagedAttentionParams& params, int32_t group) {
  planned_kv_heads_ = 0;  // until all of it has succeeded
  AttentionBatch host_batch = params.batch;
  host_batch.query_indptr = query_indptr_.data();
  host_batch.context_lengths = context_lengths_.data();
  host_batch.block_indptr = block_indptr_.data();
  const AttentionPlan plan = MakeAttentionPlan(host_batch, group, params.sliding_window,
                                               WideTileRows(PaddedHeadDim(params.head_dim)));
  FQ_RETURN_IF_ERROR(Grow(Bytes(plan.wide), &items_));
  FQ_RETURN_IF_ERROR(backend_->CopyToDevice(items_.data(), plan.wide.data(), Bytes(plan.wide)));
  work_.wide = items_.As<AttentionItem>();
  work_.num_wide = static_cast<int32_t>(plan.wide.size());
  work_.fp8_cache = fp8_cache_;
  num_single_rows_ = plan.num_single_rows;
  planned_group_ = group;
  planned_window_ = params.sliding_window;
  planned_kv_heads_ = params.num_kv_heads;
  planned_head_dim_ = params.head_dim;
  return absl::OkStatus();
}

absl::Status AttentionStep::Grow(int64_t num_bytes, DeviceBuffer* buffer) {
  if (num_bytes <= buffer->num_bytes()) return absl::OkStatus();
  // Kernels in flight may still read it. Doubling makes this rare.
  FQ_RETURN_IF_ERROR(backend_->Synchronize());
  const int64_t wanted = std::max(RoundUp<int64_t>(num_bytes, 1 << 16), 2 * buffer->num_bytes());
  *buffer = DeviceBuffer();
  FQ_ASSIGN_OR_RETURN(*buffer, backend_->Allocate(wanted));
  return absl::OkStatus();
}

}  // namespace flashquant::cuda
