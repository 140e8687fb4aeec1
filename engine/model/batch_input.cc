#include "engine/model/batch_input.h"

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

absl::StatusOr<std::unique_ptr<BatchInput>> BatchInput::Create(Backend* backend,
                                                               const BatchLimits& limits) {
  std::unique_ptr<BatchInput> input(new BatchInput(backend, limits));
  for (StagedArray<int32_t>* per_row :
       {&input->token_ids_, &input->previous_rows_, &input->positions_}) {
    FQ_RETURN_IF_ERROR(per_row->Reserve(backend, limits.max_rows));
  }
  FQ_RETURN_IF_ERROR(input->slots_.Reserve(backend, limits.max_rows));
  for (StagedArray<int32_t>* per_sequence : {&input->logit_rows_, &input->query_indptr_,
                                             &input->context_lengths_, &input->block_indptr_}) {
    FQ_RETURN_IF_ERROR(per_sequence->Reserve(backend, limits.max_sequences + 1));
  }
  FQ_RETURN_IF_ERROR(input->block_ids_.Reserve(backend, limits.max_blocks));
  return input;
}

absl::Status BatchInput::Load(const StepPlan& plan) {
  FQ_CHECK(plan.num_rows <= limits_.max_rows);
  for (StagedArray<int32_t>* array :
       {&token_ids_, &previous_rows_, &positions_, &logit_rows_, &query_indptr_, &context_lengths_,
        &block_indptr_, &block_ids_}) {
    array->Clear();
  }
  slots_.Clear();
  query_indptr_.Push(0);
  block_indptr_.Push(0);
  for (const SequenceStep& step : plan.sequences) AppendSequence(step);
  num_tokens_ = token_ids_.size();
  num_rows_ = plan.num_rows;
  for (int32_t row = num_tokens_; row < num_rows_; ++row) {
    token_ids_.Push(0);
    previous_rows_.Push(-1);
    positions_.Push(0);
    slots_.Push(-1);
  }
  for (StagedArray<int32_t>* array :
       {&token_ids_, &previous_rows_, &positions_, &logit_rows_, &query_indptr_, &context_lengths_,
        &block_indptr_, &block_ids_}) {
    FQ_RETURN_IF_ERROR(array->Upload(backend_));
  }
  FQ_RETURN_IF_ERROR(slots_.Upload(backend_));
  return backend_->PlanAttention(host_attention());
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

AttentionBatch BatchInput::attention() const {
  return {.num_sequences = context_lengths_.size(),
          .num_tokens = num_tokens_,
          .query_indptr = query_indptr_.device(),
          .context_lengths = context_lengths_.device(),
          .block_indptr = block_indptr_.device(),
          .block_ids = block_ids_.device()};
}

AttentionBatch BatchInput::host_attention() const {
  return {.num_sequences = context_lengths_.size(),
          .num_tokens = num_tokens_,
          .query_indptr = query_indptr_.host(),
          .context_lengths = context_lengths_.host(),
          .block_indptr = block_indptr_.host(),
          .block_ids = block_ids_.host()};
}

}  // namespace flashquant
