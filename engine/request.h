// What a client asked for and what the engine answers: plain data shared by server, engine and
// tools.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/clock.h"
#include "kernels/base/token_values.h"

namespace flashquant {

// All values are effective ones: defaults from generation_config.json are already filled in. Ranges
// as in SampleRow (kernels/op_params.h).
struct SamplingParams {
  float temperature = 1.0f;  // 0..2, 0 = greedy
  float top_p = 1.0f;        // (0, 1]
  int32_t top_k = 0;         // 0..V, 0 = off
  float min_p = 0.0f;        // 0..1
  uint64_t seed = 0;
  float repetition_penalty = 1.0f;         // (0, 2], 1 = off; of tokens of prompt and answer
  float presence_penalty = 0.0f;           // -2..2, 0 = off; of tokens of the answer
  float frequency_penalty = 0.0f;          // -2..2, 0 = off; as often as the answer has the token
  std::vector<TokenBias> logit_bias = {};  // at most 64, each id once, -100..100
  // Unset = no logprobs, 0 = of the chosen tokens, n = and of the n likeliest; at most
  // kMaxTopLogprobs. Changes nothing in what is drawn.
  std::optional<int32_t> top_logprobs = std::nullopt;

  // Whether a draw depends on the tokens before it.
  bool NeedsTokenCounts() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
};

struct StopConditions {
  int32_t max_output_tokens = 0;    // >= 1
  int32_t min_output_tokens = 0;    // end tokens and stops do not count before this many
  bool limited_by_context = false;  // max_output_tokens is "what fits": the end is kContextLength
  bool ignore_eos = false;
  bool include_stop = false;           // the matched stop string stays in the text
  std::vector<std::string> sequences;  // at most 8, each 1..128 bytes
  std::vector<int32_t> token_ids;      // at most 32
};

struct GenerateRequest {
  std::string request_id;              // unique among the running ones
  std::vector<int32_t> prompt_tokens;  // 1..context-1 ids below V
  SamplingParams sampling;
  StopConditions stop;
  TimePoint arrival{};                      // unset = when Submit is called
  std::optional<TimePoint> deadline;        // ends with DEADLINE_EXCEEDED at the next step after it
  std::optional<TimePoint> queue_deadline;  // RESOURCE_EXHAUSTED when not scheduled by then
  int32_t priority = 0;                     // -10..10, higher first
  std::string cache_salt;                   // at most 64 bytes; only equal ones share a prefix
};

// Logprobs of one output token: the natural logarithms of its probability and of the likeliest
// ones, by the model's logits as they are, before penalties, bias, temperature and filters.
struct OutputLogprobs {
  TokenLogprob chosen;
  std::vector<TokenLogprob> top = {};  // highest first, lower id first among equal ones
};

enum class FinishReason { kEos, kStopSequence, kStopToken, kLength, kContextLength };

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t cached_prompt_tokens = 0;
  int64_t output_tokens = 0;
  int64_t recomputed_tokens = 0;  // computed again after preemptions
  int32_t preemptions = 0;
};

struct RequestTiming {
  Duration queue{};        // arrival to first scheduling
  Duration prefill{};      // first scheduling to first token
  Duration decode{};       // first to last token
  Duration first_token{};  // arrival to first token
};

// The one terminal event of an accepted request. `reason` and the matched stop are valid when
// `status` is OK. Other statuses: CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED (queue timeout),
// UNAVAILABLE (draining, engine failed), INTERNAL (non-finite logits). `error_reason` is then the
// ErrorInfo reason ("QUEUE_TIMEOUT").
struct FinishedEvent {
  absl::Status status;
  std::string error_reason;
  FinishReason reason = FinishReason::kEos;
  std::optional<int32_t> matched_sequence;  // index into StopConditions::sequences
  std::optional<int32_t> matched_token;     // the end token or stop token id
  // Bytes of the answer's text that count (a stop string and what follows are cut), nullopt = all
  // of it.
  std::optional<int64_t> text_bytes;
  Usage usage;
  RequestTiming timing;
};

}  // namespace flashquant
