// End tokens, stop tokens, stop strings and length, in that order.
#include "engine/sampling/stop_checker.h"

#include <algorithm>

#include "engine/tokenizer/incremental_detokenizer.h"
#include "engine/tokenizer/tokenizer.h"

namespace flashquant {

StopChecker::StopChecker(const StopConditions* stop, std::span<const int32_t> eos_token_ids,
                         const Tokenizer* tokenizer)
    : stop_(stop),
      eos_token_ids_(eos_token_ids.begin(), eos_token_ids.end()),
      tokenizer_(tokenizer),
      matcher_(stop->sequences) {}

std::optional<StopVerdict> StopChecker::Accept(int32_t token_id) {
  ++num_output_tokens_;
  std::optional<StopVerdict> verdict;
  if (num_output_tokens_ >= stop_->min_output_tokens) verdict = CheckEndTokens(token_id);
  if (verdict.has_value()) {
    // The text before the token: the token itself is an end mark, not part of the answer.
    if (verdict->reason == FinishReason::kEos || !stop_->include_stop) {
      verdict->text_bytes = num_text_bytes();
    }
    return verdict;
  }
  if (tokenizer_ != nullptr) {
    verdict = CheckStopSequences(token_id);
    if (verdict.has_value()) return verdict;
  }
  if (num_output_tokens_ >= stop_->max_output_tokens) {
    return StopVerdict{
        .reason = stop_->limited_by_context ? FinishReason::kContextLength : FinishReason::kLength,
        .matched_sequence = {},
        .matched_token = {},
        .text_bytes = {}};
  }
  return std::nullopt;
}

std::optional<StopVerdict> StopChecker::CheckEndTokens(int32_t token_id) const {
  StopVerdict verdict;
  verdict.matched_token = token_id;
  if (!stop_->ignore_eos && std::ranges::find(eos_token_ids_, token_id) != eos_token_ids_.end()) {
    verdict.reason = FinishReason::kEos;
    return verdict;
  }
  if (std::ranges::find(stop_->token_ids, token_id) != stop_->token_ids.end()) {
    verdict.reason = FinishReason::kStopToken;
    return verdict;
  }
  return std::nullopt;
}

std::optional<StopVerdict> StopChecker::CheckStopSequences(int32_t token_id) {
  const bool counts = num_output_tokens_ >= stop_->min_output_tokens;
  const auto match = matcher_.Feed(AnswerBytes(*tokenizer_, token_id), counts);
  if (!match.has_value()) return std::nullopt;
  StopVerdict verdict;
  verdict.reason = FinishReason::kStopSequence;
  verdict.matched_sequence = match->sequence;
  verdict.text_bytes = stop_->include_stop ? match->end : match->begin;
  return verdict;
}

}  // namespace flashquant
