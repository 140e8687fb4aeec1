// StopChecker: decides after each output token whether a request is finished, and why. Holding back
// text that may yet become a stop string is the delivery side's business.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/request.h"
#include "engine/tokenizer/stop_matcher.h"

namespace flashquant {

class Tokenizer;

// The fields of FinishedEvent that a normal end sets.
struct StopVerdict {
  FinishReason reason = FinishReason::kEos;
  std::optional<int32_t> matched_sequence;  // index into StopConditions::sequences
  std::optional<int32_t> matched_token;     // the end token or stop token
  std::optional<int64_t> text_bytes;        // what counts of the answer's text; nullopt = all
};

// One object per request, one call per output token, in order. In one token the first of these that
// applies wins: end token, stop token, stop string, length. Of several stop strings the one that
// ends first wins, then the longer. What ends before the min_output_tokens-th token does not count.
class StopChecker final {
 public:
  // `tokenizer` null: no text, hence no stop strings. It and `stop` outlive the object.
  StopChecker(const StopConditions* stop, std::span<const int32_t> eos_token_ids,
              const Tokenizer* tokenizer);

  // nullopt = go on. Not to be called again after a verdict.
  std::optional<StopVerdict> Accept(int32_t token_id);

  int64_t num_output_tokens() const { return num_output_tokens_; }
  // Bytes of answer text so far (AnswerBytes of the output tokens).
  int64_t num_text_bytes() const { return matcher_.num_bytes(); }

 private:
  std::optional<StopVerdict> CheckEndTokens(int32_t token_id) const;
  std::optional<StopVerdict> CheckStopSequences(int32_t token_id);

  const StopConditions* const stop_;
  const std::vector<int32_t> eos_token_ids_;
  const Tokenizer* const tokenizer_;
  StopMatcher matcher_;
  int64_t num_output_tokens_ = 0;
};

}  // namespace flashquant
