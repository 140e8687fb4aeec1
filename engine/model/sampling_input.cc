#include "engine/model/sampling_input.h"

#include <utility>

#include "kernels/base/status_macros.h"

namespace flashquant {

// The caps on StopConditions::token_ids and SamplingParams::logit_bias; server/request_validation.h
// enforces them for clients.
constexpr int64_t kMaxStopTokens = 32;
constexpr int64_t kMaxBiases = 64;

absl::StatusOr<std::unique_ptr<SamplingInput>> SamplingInput::Create(
    Backend* backend, int32_t max_sequences, int32_t max_token_counts,
    std::vector<int32_t> eos_token_ids) {
  const int64_t max_banned = static_cast<int64_t>(eos_token_ids.size()) + kMaxStopTokens;
  std::unique_ptr<SamplingInput> input(new SamplingInput(backend, std::move(eos_token_ids)));
  FQ_RETURN_IF_ERROR(input->rows_.Reserve(backend, max_sequences));
  FQ_RETURN_IF_ERROR(input->banned_ids_.Reserve(backend, max_sequences * max_banned));
  FQ_RETURN_IF_ERROR(
      input->token_counts_.Reserve(backend, int64_t{max_sequences} * max_token_counts));
  FQ_RETURN_IF_ERROR(input->biases_.Reserve(backend, max_sequences * kMaxBiases));
  return input;
}

absl::Status SamplingInput::Load(const StepPlan& plan, int32_t least_rows) {
  rows_.Clear();
  banned_ids_.Clear();
  token_counts_.Clear();
  biases_.Clear();
  for (const SequenceStep& step : plan.sequences) {
    if (!step.samples) continue;
    const int32_t banned_begin = banned_ids_.size();
    if (step.end_tokens_banned) {
      for (const int32_t id : eos_token_ids_) banned_ids_.Push(id);
      for (const int32_t id : step.stop->token_ids) banned_ids_.Push(id);
    }
    const SamplingParams& sampling = *step.sampling;
    const int32_t counts_begin = token_counts_.size();
    for (const TokenCount& count : step.token_counts) token_counts_.Push(count);
    const int32_t biases_begin = biases_.size();
    for (const TokenBias& bias : sampling.logit_bias) biases_.Push(bias);
    rows_.Push({.temperature = sampling.temperature,
                .top_p = sampling.top_p,
                .min_p = sampling.min_p,
                .top_k = sampling.top_k,
                .seed = sampling.seed,
                .output_position = step.output_position,
                .banned_begin = banned_begin,
                .banned_end = banned_ids_.size(),
                .repetition_penalty = sampling.repetition_penalty,
                .presence_penalty = sampling.presence_penalty,
                .frequency_penalty = sampling.frequency_penalty,
                .counts_begin = counts_begin,
                .counts_end = token_counts_.size(),
                .biases_begin = biases_begin,
                .biases_end = biases_.size(),
                .top_logprobs = sampling.top_logprobs.value_or(-1)});
  }
  while (rows_.size() < least_rows) rows_.Push({.temperature = 0.0f});
  FQ_RETURN_IF_ERROR(rows_.Upload(backend_));
  FQ_RETURN_IF_ERROR(banned_ids_.Upload(backend_));
  FQ_RETURN_IF_ERROR(token_counts_.Upload(backend_));
  return biases_.Upload(backend_);
}

}  // namespace flashquant
