#include "engine/model/sampling_input.h"

#include <utility>

#include "kernels/base/status_macros.h"

namespace flashquant {

// The cap on StopConditions::token_ids; server/request_mapping.h enforces it for clients.
constexpr int64_t kMaxStopTokens = 32;

absl::StatusOr<std::unique_ptr<SamplingInput>> SamplingInput::Create(
    Backend* backend, int32_t max_sequences, std::vector<int32_t> eos_token_ids) {
  const int64_t max_banned = static_cast<int64_t>(eos_token_ids.size()) + kMaxStopTokens;
  std::unique_ptr<SamplingInput> input(new SamplingInput(backend, std::move(eos_token_ids)));
  FQ_RETURN_IF_ERROR(input->rows_.Reserve(backend, max_sequences));
  FQ_RETURN_IF_ERROR(input->banned_ids_.Reserve(backend, max_sequences * max_banned));
  return input;
}

absl::Status SamplingInput::Load(const StepPlan& plan, int32_t least_rows) {
  rows_.Clear();
  banned_ids_.Clear();
  for (const SequenceStep& step : plan.sequences) {
    if (!step.samples) continue;
    const int32_t banned_begin = banned_ids_.size();
    if (step.end_tokens_banned) {
      for (const int32_t id : eos_token_ids_) banned_ids_.Push(id);
      for (const int32_t id : step.stop->token_ids) banned_ids_.Push(id);
    }
    const SamplingParams& sampling = *step.sampling;
    rows_.Push({.temperature = sampling.temperature,
                .top_p = sampling.top_p,
                .min_p = sampling.min_p,
                .top_k = sampling.top_k,
                .seed = sampling.seed,
                .output_position = step.output_position,
                .banned_begin = banned_begin,
                .banned_end = banned_ids_.size()});
  }
  while (rows_.size() < least_rows) rows_.Push({.temperature = 0.0f});
  FQ_RETURN_IF_ERROR(rows_.Upload(backend_));
  return banned_ids_.Upload(backend_);
}

}  // namespace flashquant
