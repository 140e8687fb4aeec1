#include "engine/model/model_step_runner.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// Token ids of a step come back through this slot, the marks of non-finite rows through the next.
int32_t FirstReadBackSlot(int64_t step) { return static_cast<int32_t>(step % 2) * 2; }

}  // namespace

absl::StatusOr<std::unique_ptr<ModelStepRunner>> ModelStepRunner::Create(
    const DecoderModel* model, Backend* backend, const StepRunnerOptions& options) {
  const ModelConfig& config = model->config();
  // Sequences share no blocks, so a step cannot name more than there are.
  const int64_t max_blocks = std::min<int64_t>(
      options.num_blocks,
      int64_t{options.max_sequences} * CeilDiv(options.context_length, options.block_tokens));
  const BatchLimits limits = {.max_rows = RoundUp(options.token_budget, options.row_multiple),
                              .max_sequences = options.max_sequences,
                              .max_blocks = static_cast<int32_t>(max_blocks),
                              .block_tokens = options.block_tokens};
  const PagedKvGeometry kv = {.num_layers = config.num_layers,
                              .num_blocks = options.num_blocks,
                              .block_tokens = options.block_tokens,
                              .num_kv_heads = config.num_kv_heads,
                              .head_dim = config.head_dim};

  std::unique_ptr<ModelStepRunner> runner(new ModelStepRunner(model, backend));
  FQ_ASSIGN_OR_RETURN(runner->cache_, KvCache::Create(backend, kv));
  FQ_ASSIGN_OR_RETURN(runner->activations_,
                      Activations::Create(backend, config, limits.max_rows, options.max_sequences));
  FQ_ASSIGN_OR_RETURN(runner->batch_, BatchInput::Create(backend, limits));
  FQ_ASSIGN_OR_RETURN(runner->sampling_,
                      SamplingInput::Create(backend, options.max_sequences, options.eos_token_ids));
  for (Samples& samples : runner->samples_) {
    FQ_ASSIGN_OR_RETURN(samples.token_ids, backend->Allocate(options.max_sequences * 4));
    FQ_ASSIGN_OR_RETURN(samples.non_finite, backend->Allocate(options.max_sequences));
  }
  return runner;
}

absl::Status ModelStepRunner::Launch(const StepPlan& plan) {
  FQ_CHECK(num_launched_ - num_collected_ < 2);
  const Samples& previous = samples_[static_cast<size_t>((num_launched_ + 1) % 2)];
  const Samples& current = samples_[static_cast<size_t>(num_launched_ % 2)];
  FQ_RETURN_IF_ERROR(batch_->Load(plan));
  FQ_RETURN_IF_ERROR(sampling_->Load(plan));
  FQ_RETURN_IF_ERROR(
      model_->Forward(*batch_, previous.token_ids.As<int32_t>(), *cache_, activations_.get()));
  const int32_t num_samples = batch_->num_logit_rows();
  FQ_RETURN_IF_ERROR(model_->ComputeLogits(batch_->logit_rows(), num_samples, activations_.get()));
  FQ_RETURN_IF_ERROR(Sample(num_samples, current));

  std::vector<SequenceId> ids;
  for (const SequenceStep& step : plan.sequences) {
    if (step.samples) ids.push_back(step.id);
  }
  launched_ids_.push_back(std::move(ids));
  ++num_launched_;
  return absl::OkStatus();
}

absl::Status ModelStepRunner::Sample(int32_t num_rows, const Samples& samples) {
  if (num_rows > 0) {
    FQ_RETURN_IF_ERROR(backend_->SampleTokens({.num_rows = num_rows,
                                               .vocab_size = model_->config().vocab_size,
                                               .logits = activations_->logits.As<float>(),
                                               .rows = sampling_->rows(),
                                               .banned_ids = sampling_->banned_ids(),
                                               .token_ids = samples.token_ids.As<int32_t>(),
                                               .non_finite = samples.non_finite.As<uint8_t>()}));
  }
  // Collect waits for these copies alone, not for a step launched meanwhile; also when there is
  // nothing to copy, so that a step that only fills the cache has run when it is collected.
  const int32_t slot = FirstReadBackSlot(num_launched_);
  FQ_RETURN_IF_ERROR(
      backend_->QueueReadBack(slot, samples.token_ids.data(), int64_t{num_rows} * 4));
  return backend_->QueueReadBack(slot + 1, samples.non_finite.data(), num_rows);
}

absl::StatusOr<StepResult> ModelStepRunner::Collect() {
  FQ_CHECK(num_collected_ < num_launched_);
  const int32_t slot = FirstReadBackSlot(num_collected_);
  const std::vector<SequenceId> ids = std::move(launched_ids_.front());
  launched_ids_.pop_front();
  ++num_collected_;

  std::vector<int32_t> token_ids(ids.size());
  std::vector<uint8_t> non_finite(ids.size());
  FQ_RETURN_IF_ERROR(backend_->FinishReadBack(slot, token_ids.data()));
  FQ_RETURN_IF_ERROR(backend_->FinishReadBack(slot + 1, non_finite.data()));

  StepResult result;
  for (size_t row = 0; row < ids.size(); ++row) {
    result.tokens.push_back(
        {.id = ids[row], .token_id = token_ids[row], .non_finite = non_finite[row] != 0});
  }
  return result;
}

}  // namespace flashquant
