#include "engine/model/batch_input.h"

#include <cstring>

#include "kernels/base/check.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kAlignment = 16;  // of each array

}  // namespace

absl::StatusOr<std::unique_ptr<BatchInput>> BatchInput::Create(Backend* backend,
                                                               const BatchLimits& limits) {
  std::unique_ptr<BatchInput> input(new BatchInput(backend, limits));
  constexpr int64_t kRowBytes = 3 * sizeof(int32_t) + sizeof(int64_t);
  constexpr int64_t kSequenceBytes = 4 * sizeof(int32_t);
  constexpr int64_t kNumArrays = 9;
  const int64_t num_bytes = limits.max_rows * kRowBytes +
                            (int64_t{limits.max_sequences} + 1) * kSequenceBytes +
                            limits.max_blocks * int64_t{sizeof(int32_t)} + kNumArrays * kAlignment;
  input->staged_.reserve(static_cast<size_t>(num_bytes));
  FQ_ASSIGN_OR_RETURN(input->device_, backend->Allocate(num_bytes));
  return input;
}

absl::Status BatchInput::Load(const StepPlan& plan) {
  FQ_CHECK(plan.num_rows <= limits_.max_rows);
  Clear();
  for (const SequenceStep& step : plan.sequences) AppendSequence(step);
  num_tokens_ = token_ids_.size();
  num_rows_ = plan.num_rows;
  for (int32_t row = num_tokens_; row < num_rows_; ++row) AppendPaddingRow();
  FQ_RETURN_IF_ERROR(Upload());
  return backend_->PlanAttention(host_attention());
}

absl::Status BatchInput::LoadDecode(const StepPlan& plan) {
  FQ_CHECK(plan.num_rows <= limits_.max_rows && plan.num_rows <= limits_.max_sequences);
  Clear();
  for (const SequenceStep& step : plan.sequences) AppendSequence(step);
  num_tokens_ = num_rows_ = plan.num_rows;
  for (int32_t row = token_ids_.size(); row < num_rows_; ++row) {
    AppendPaddingRow();
    logit_rows_.Push(row);
    query_indptr_.Push(row + 1);
    context_lengths_.Push(0);
    block_indptr_.Push(block_ids_.size());
  }
  FQ_CHECK(logit_rows_.size() == num_rows_);
  FQ_RETURN_IF_ERROR(Upload());
  return backend_->PlanAttention(host_attention());
}

void BatchInput::Clear() {
  for (Array<int32_t>* array : {&token_ids_, &previous_rows_, &positions_, &logit_rows_,
                                &query_indptr_, &context_lengths_, &block_indptr_, &block_ids_}) {
    array->host.clear();
  }
  slots_.host.clear();
  query_indptr_.Push(0);
  block_indptr_.Push(0);
}

void BatchInput::AppendPaddingRow() {
  token_ids_.Push(0);
  previous_rows_.Push(-1);
  positions_.Push(0);
  slots_.Push(-1);
}

void BatchInput::AppendSequence(const SequenceStep& step) {
  const auto num_new = static_cast<int32_t>(step.token_ids.size());
  for (int32_t i = 0; i < num_new; ++i) {
    const int32_t position = step.first_position + i;
    const auto block = static_cast<size_t>(position / limits_.block_tokens);
    FQ_CHECK(block < step.block_ids.size());
    const bool is_last = i == num_new - 1;
    token_ids_.Push(step.token_ids[static_cast<size_t>(i)]);
    previous_rows_.Push(is_last ? step.previous_row : -1);
    positions_.Push(position);
    slots_.Push(static_cast<int64_t>(step.block_ids[block]) * limits_.block_tokens +
                position % limits_.block_tokens);
  }
  if (step.samples) logit_rows_.Push(token_ids_.size() - 1);
  query_indptr_.Push(token_ids_.size());
  context_lengths_.Push(step.first_position + num_new);
  for (const int32_t block_id : step.block_ids) block_ids_.Push(block_id);
  block_indptr_.Push(block_ids_.size());
}

template <typename T>
void BatchInput::Place(Array<T>* array) {
  const size_t offset = RoundUp<size_t>(staged_.size(), kAlignment);
  staged_.resize(offset + array->host.size() * sizeof(T));
  // Empty arrays have no data to copy from.
  if (!array->host.empty()) {
    std::memcpy(staged_.data() + offset, array->host.data(), array->host.size() * sizeof(T));
  }
  array->device = reinterpret_cast<const T*>(device_.As<uint8_t>() + offset);
}

// Block ids come last: their number is the only one that changes with the context.
absl::Status BatchInput::Upload() {
  staged_.clear();
  Place(&slots_);
  for (Array<int32_t>* array : {&token_ids_, &previous_rows_, &positions_, &logit_rows_,
                                &query_indptr_, &context_lengths_, &block_indptr_, &block_ids_}) {
    Place(array);
  }
  const auto num_bytes = static_cast<int64_t>(staged_.size());
  FQ_CHECK(num_bytes <= device_.num_bytes());
  return backend_->CopyToDevice(device_.data(), staged_.data(), num_bytes);
}

AttentionBatch BatchInput::attention() const {
  return {.num_sequences = context_lengths_.size(),
          .num_tokens = num_tokens_,
          .query_indptr = query_indptr_.device,
          .context_lengths = context_lengths_.device,
          .block_indptr = block_indptr_.device,
          .block_ids = block_ids_.device};
}

AttentionBatch BatchInput::host_attention() const {
  return {.num_sequences = context_lengths_.size(),
          .num_tokens = num_tokens_,
          .query_indptr = query_indptr_.host.data(),
          .context_lengths = context_lengths_.host.data(),
          .block_indptr = block_indptr_.host.data(),
          .block_ids = block_ids_.host.data()};
}

}  // namespace flashquant
