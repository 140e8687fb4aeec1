#include "engine/model/model_step_runner.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// A step's samples come back through this slot.
int32_t ReadBackSlot(int64_t step) { return static_cast<int32_t>(step % 2); }

constexpr int64_t kIdBytes = sizeof(int32_t);

}  // namespace

ModelStepRunner::ModelStepRunner(const DecoderModel* model, Backend* backend,
                                 const StepRunnerOptions& options)
    : model_(model),
      backend_(backend),
      options_(options),
      max_samples_(RoundUp(options.max_sequences, options.row_multiple)) {}

absl::StatusOr<std::unique_ptr<ModelStepRunner>> ModelStepRunner::Create(
    const DecoderModel* model, Backend* backend, const StepRunnerOptions& options) {
  const ModelConfig& config = model->config();
  std::unique_ptr<ModelStepRunner> runner(new ModelStepRunner(model, backend, options));
  // Sequences share no blocks, so a step cannot name more than there are.
  const int64_t max_blocks = std::min<int64_t>(
      options.num_blocks,
      int64_t{options.max_sequences} * CeilDiv(options.context_length, options.block_tokens));
  const int32_t max_rows =
      std::max(RoundUp(options.token_budget, options.row_multiple), runner->max_samples_);
  const BatchLimits limits = {.max_rows = max_rows,
                              .max_sequences = runner->max_samples_,
                              .max_blocks = static_cast<int32_t>(max_blocks),
                              .block_tokens = options.block_tokens};
  const PagedKvGeometry kv = {.num_layers = config.num_layers,
                              .num_blocks = options.num_blocks,
                              .block_tokens = options.block_tokens,
                              .num_kv_heads = config.num_kv_heads,
                              .head_dim = config.head_dim};
  FQ_ASSIGN_OR_RETURN(runner->cache_, KvCache::Create(backend, kv));
  FQ_ASSIGN_OR_RETURN(runner->activations_,
                      Activations::Create(backend, config, max_rows, runner->max_samples_));
  FQ_ASSIGN_OR_RETURN(runner->batch_, BatchInput::Create(backend, limits));
  FQ_ASSIGN_OR_RETURN(runner->sampling_,
                      SamplingInput::Create(backend, runner->max_samples_, options.eos_token_ids));
  FQ_ASSIGN_OR_RETURN(runner->samples_, backend->Allocate(runner->max_samples_ * (kIdBytes + 1)));
  return runner;
}

bool ModelStepRunner::IsRecordable(const StepPlan& plan) const {
  return options_.record_decode && plan.num_rows <= max_samples_ &&
         std::all_of(plan.sequences.begin(), plan.sequences.end(), [](const SequenceStep& step) {
           return step.token_ids.size() == 1 && step.samples;
         });
}

absl::Status ModelStepRunner::Launch(const StepPlan& plan) {
  FQ_CHECK(num_launched_ - num_collected_ < 2);
  if (IsRecordable(plan)) {
    FQ_RETURN_IF_ERROR(batch_->LoadDecode(plan));
    FQ_RETURN_IF_ERROR(sampling_->Load(plan, plan.num_rows));
    FQ_RETURN_IF_ERROR(backend_->RunRecorded(this, plan.num_rows,
                                             [&] { return QueueOps(nullptr, plan.num_rows); }));
  } else {
    FQ_RETURN_IF_ERROR(batch_->Load(plan));
    FQ_RETURN_IF_ERROR(sampling_->Load(plan, 0));
    FQ_RETURN_IF_ERROR(QueueOps(batch_->logit_rows(), batch_->num_logit_rows()));
  }
  // Collect waits for this copy alone, not for a step launched meanwhile; also when no sequence
  // samples, so that a step that only fills the cache has run when it is collected.
  FQ_RETURN_IF_ERROR(
      backend_->QueueReadBack(ReadBackSlot(num_launched_), samples_.data(), samples_.num_bytes()));
  std::vector<SequenceId> ids;
  for (const SequenceStep& step : plan.sequences) {
    if (step.samples) ids.push_back(step.id);
  }
  launched_ids_.push_back(std::move(ids));
  ++num_launched_;
  return absl::OkStatus();
}

absl::Status ModelStepRunner::QueueOps(const int32_t* logit_rows, int32_t num_samples) {
  auto* const token_ids = samples_.As<int32_t>();
  FQ_RETURN_IF_ERROR(model_->Forward(*batch_, token_ids, *cache_, activations_.get()));
  FQ_RETURN_IF_ERROR(model_->ComputeLogits(logit_rows, num_samples, activations_.get()));
  if (num_samples == 0) return absl::OkStatus();
  return backend_->SampleTokens(
      {.num_rows = num_samples,
       .vocab_size = model_->config().vocab_size,
       .logits = activations_->logits.As<float>(),
       .rows = sampling_->rows(),
       .banned_ids = sampling_->banned_ids(),
       .token_ids = token_ids,
       .non_finite = reinterpret_cast<uint8_t*>(token_ids + max_samples_)});
}

absl::StatusOr<StepResult> ModelStepRunner::Collect() {
  FQ_CHECK(num_collected_ < num_launched_);
  const int32_t slot = ReadBackSlot(num_collected_);
  const std::vector<SequenceId> ids = std::move(launched_ids_.front());
  launched_ids_.pop_front();
  ++num_collected_;

  std::vector<uint8_t> samples(static_cast<size_t>(samples_.num_bytes()));
  FQ_RETURN_IF_ERROR(backend_->FinishReadBack(slot, samples.data()));
  StepResult result;
  for (size_t row = 0; row < ids.size(); ++row) {
    SampledToken token = {.id = ids[row]};
    std::memcpy(&token.token_id, samples.data() + row * kIdBytes, kIdBytes);
    token.non_finite = samples[static_cast<size_t>(max_samples_) * kIdBytes + row] != 0;
    result.tokens.push_back(token);
  }
  return result;
}

}  // namespace flashquant
