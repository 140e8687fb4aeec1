#include "engine/model/model_step_runner.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// A step's samples come back through this slot.
int32_t ReadBackSlot(int64_t step) { return static_cast<int32_t>(step % 2); }

constexpr int64_t kIdBytes = sizeof(int32_t);
constexpr int64_t kLogprobRowBytes = kLogprobsPerRow * sizeof(TokenLogprob);

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
  // Sequences may share blocks: a step can name more than there are.
  const int64_t max_blocks =
      std::min<int64_t>(INT32_MAX, int64_t{options.max_sequences} *
                                       CeilDiv(options.context_length, options.block_tokens));
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
                      SamplingInput::Create(backend, runner->max_samples_,
                                            std::min(config.vocab_size, options.context_length),
                                            options.eos_token_ids));
  FQ_ASSIGN_OR_RETURN(runner->samples_,
                      backend->Allocate(runner->logprobs_offset() +
                                        int64_t{runner->max_samples_} * kLogprobRowBytes));
  FQ_ASSIGN_OR_RETURN(runner->scratch_,
                      backend->Allocate(int64_t{runner->max_samples_} * config.vocab_size *
                                        static_cast<int64_t>(sizeof(float))));
  return runner;
}

int64_t ModelStepRunner::logprobs_offset() const {
  return RoundUp<int64_t>(int64_t{max_samples_} * (kIdBytes + 1), alignof(TokenLogprob));
}

bool ModelStepRunner::IsRecordable(const StepPlan& plan) const {
  return options_.record_decode && plan.num_rows <= max_samples_ &&
         std::all_of(plan.sequences.begin(), plan.sequences.end(), [](const SequenceStep& step) {
           return step.token_ids.size() == 1 && step.samples;
         });
}

absl::Status ModelStepRunner::Launch(const StepPlan& plan) {
  FQ_CHECK(num_launched_ - num_collected_ < 2);
  const TimePoint begin = clock_.Now();
  times_ = {};
  if (IsRecordable(plan)) {
    FQ_RETURN_IF_ERROR(batch_->LoadDecode(plan));
    FQ_RETURN_IF_ERROR(sampling_->Load(plan, plan.num_rows));
    times_.upload = clock_.Now() - begin;
    FQ_RETURN_IF_ERROR(QueueOps(plan.num_rows, nullptr, plan.num_rows));
  } else {
    FQ_RETURN_IF_ERROR(batch_->Load(plan));
    FQ_RETURN_IF_ERROR(sampling_->Load(plan, 0));
    times_.upload = clock_.Now() - begin;
    FQ_RETURN_IF_ERROR(QueueOps(0, batch_->logit_rows(), batch_->num_logit_rows()));
  }
  // Collect waits for this copy alone, not for a step launched meanwhile; also when no sequence
  // samples, so that a step that only fills the cache has run when it is collected.
  std::vector<LaunchedRow> rows;
  bool any_logprobs = false;
  for (const SequenceStep& step : plan.sequences) {
    if (!step.samples) continue;
    rows.push_back({step.id, step.sampling->top_logprobs});
    any_logprobs = any_logprobs || step.sampling->top_logprobs.has_value();
  }
  FQ_RETURN_IF_ERROR(
      backend_->QueueReadBack(ReadBackSlot(num_launched_), samples_.data(),
                              any_logprobs ? samples_.num_bytes() : logprobs_offset()));
  launched_.push_back({std::move(rows), times_});
  ++num_launched_;
  return absl::OkStatus();
}

absl::Status ModelStepRunner::QueueOps(int32_t key, const int32_t* logit_rows,
                                       int32_t num_samples) {
  const int32_t slot = ReadBackSlot(num_launched_);
  const std::array<std::function<absl::Status()>, 3> parts = {
      [&] { return model_->Forward(*batch_, samples_.As<int32_t>(), *cache_, activations_.get()); },
      [&] { return model_->ComputeLogits(logit_rows, num_samples, activations_.get()); },
      [&] { return QueueSampling(num_samples); }};
  FQ_RETURN_IF_ERROR(backend_->RecordMark(slot, 0));
  for (int32_t part = 0; part < 3; ++part) {
    const auto& queue = parts[static_cast<size_t>(part)];
    FQ_RETURN_IF_ERROR(key == 0 ? queue() : backend_->RunRecorded(this, 3 * key + part, queue));
    FQ_RETURN_IF_ERROR(backend_->RecordMark(slot, part + 1));
  }
  return absl::OkStatus();
}

absl::Status ModelStepRunner::QueueSampling(int32_t num_samples) {
  if (num_samples == 0) return absl::OkStatus();
  auto* const token_ids = samples_.As<int32_t>();
  const TimePoint begin = clock_.Now();
  const absl::Status sampled = backend_->SampleTokens(
      {.num_rows = num_samples,
       .vocab_size = model_->config().vocab_size,
       .logits = activations_->logits.As<float>(),
       .rows = sampling_->rows(),
       .banned_ids = sampling_->banned_ids(),
       .token_counts = sampling_->token_counts(),
       .biases = sampling_->biases(),
       .token_ids = token_ids,
       .non_finite = reinterpret_cast<uint8_t*>(token_ids + max_samples_),
       .scratch = scratch_.As<float>(),
       .logprobs = reinterpret_cast<TokenLogprob*>(samples_.As<uint8_t>() + logprobs_offset())});
  if (!options_.record_decode) times_.sample = clock_.Now() - begin;
  return sampled;
}

absl::StatusOr<StepResult> ModelStepRunner::Collect() {
  FQ_CHECK(num_collected_ < num_launched_);
  const int32_t slot = ReadBackSlot(num_collected_);
  const std::vector<LaunchedRow> rows = std::move(launched_.front().rows);
  last_times_ = launched_.front().times;
  launched_.pop_front();
  ++num_collected_;

  const TimePoint begin = clock_.Now();
  std::vector<uint8_t> samples(static_cast<size_t>(samples_.num_bytes()));
  FQ_RETURN_IF_ERROR(backend_->FinishReadBack(slot, samples.data()));
  if (!options_.record_decode) last_times_.download = clock_.Now() - begin;
  const auto on_device = [&](int32_t mark) {
    return DurationFromSeconds(backend_->SecondsBetweenMarks(slot, mark, mark + 1));
  };
  last_times_.device_layers = on_device(0);
  last_times_.device_head = on_device(1);
  last_times_.device_sampling = on_device(2);
  StepResult result;
  for (size_t row = 0; row < rows.size(); ++row) {
    SampledToken token = {.id = rows[row].id};
    std::memcpy(&token.token_id, samples.data() + row * kIdBytes, kIdBytes);
    token.non_finite = samples[static_cast<size_t>(max_samples_) * kIdBytes + row] != 0;
    if (rows[row].top_logprobs.has_value() && !token.non_finite) {
      token.logprobs = LogprobsOf(
          samples.data() + logprobs_offset() + static_cast<int64_t>(row) * kLogprobRowBytes,
          *rows[row].top_logprobs);
    }
    result.tokens.push_back(std::move(token));
  }
  return result;
}

OutputLogprobs ModelStepRunner::LogprobsOf(const uint8_t* row, int32_t top_logprobs) {
  std::vector<TokenLogprob> values(static_cast<size_t>(1 + top_logprobs));
  std::memcpy(values.data(), row, values.size() * sizeof(TokenLogprob));
  // A small vocabulary has fewer.
  std::erase_if(values, [](const TokenLogprob& value) { return value.token_id < 0; });
  return {values.front(), {values.begin() + 1, values.end()}};
}

}  // namespace flashquant
