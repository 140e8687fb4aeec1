// One step as plain data: what the scheduler decided (StepPlan), and what came of it (StepResult).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/request.h"
#include "kernels/base/token_values.h"

namespace flashquant {

using SequenceId = int64_t;

// The part of a sequence that runs in this step: tokens at positions first_position ..
// first_position + token_ids.size() - 1. Spans stay valid until the next call of the scheduler.
struct SequenceStep {
  SequenceId id = 0;
  int32_t first_position = 0;
  std::span<const int32_t> token_ids = {};
  // All blocks of the sequence, enough for this step's tokens.
  std::span<const int32_t> block_ids = {};
  // The last token's logits give the next output token.
  bool samples = false;
  // That token's index among the outputs.
  int64_t output_position = 0;
  // Below min_output_tokens: end tokens must not be drawn.
  bool end_tokens_banned = false;
  const SamplingParams* sampling = nullptr;
  const StopConditions* stop = nullptr;
  // Run-ahead: the last token is still unknown to the host; it is what the step before sampled in
  // this row of its StepResult::tokens. -1 = token_ids is complete.
  int32_t previous_row = -1;
  // The distinct tokens before the one to draw, when its penalties need them: those of the answer,
  // and those of the prompt for a repetition penalty. Such a sequence never has a previous_row.
  std::span<const TokenCount> token_counts = {};
};

// A step with any sequence of more than one new token is a prefill.
enum class StepPhase { kPrefill, kDecode };

struct StepPlan {
  std::vector<SequenceStep> sequences;
  int32_t num_tokens = 0;  // real rows
  int32_t num_rows = 0;    // rows launched: num_tokens rounded up to the backend's row multiple
  StepPhase phase = StepPhase::kDecode;
  bool empty() const { return sequences.empty(); }
};

struct SampledToken {
  SequenceId id = 0;
  int32_t token_id = 0;
  // The row's logits had NaN or infinity: the request fails, the token is void.
  bool non_finite = false;
  // When the request asks for them.
  std::optional<OutputLogprobs> logprobs = std::nullopt;
};

// One entry per SequenceStep with `samples`, in the plan's order.
struct StepResult {
  std::vector<SampledToken> tokens;
};

}  // namespace flashquant
