// End tokens, stop tokens, stop strings and length, in that order.
#include "engine/sampling/stop_checker.h"

#include <algorithm>

#include "engine/tokenizer/tokenizer.h"

namespace flashquant {

StopChecker::StopChecker(const StopConditions* stop, std::span<const int32_t> eos_token_ids,
                         const Tokenizer* tokenizer)
    : stop_(stop),
      eos_token_ids_(eos_token_ids.begin(), eos_token_ids.end()),
      tokenizer_(tokenizer) {
  for (const std::string& sequence : stop->sequences) {
    longest_sequence_ = std::max(longest_sequence_, sequence.size());
  }
}

std::optional<StopVerdict> StopChecker::Accept(int32_t token_id) {
  ++num_output_tokens_;
  std::optional<StopVerdict> verdict;
  if (num_output_tokens_ > stop_->min_output_tokens) verdict = CheckEndTokens(token_id);
  if (verdict.has_value()) {
    // The text before the token: the token itself is an end mark, not part of the answer.
    if (verdict->reason == FinishReason::kEos || !stop_->include_stop) {
      verdict->text_bytes = num_text_bytes_;
    }
    return verdict;
  }
  if (tokenizer_ != nullptr && !tokenizer_->IsSpecial(token_id)) {
    const std::string_view bytes = tokenizer_->TokenBytes(token_id);
    num_text_bytes_ += static_cast<int64_t>(bytes.size());
    verdict = CheckStopSequences(bytes);
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

std::optional<StopVerdict> StopChecker::CheckStopSequences(std::string_view bytes) {
  if (longest_sequence_ == 0) return std::nullopt;
  const size_t seen = tail_.size();
  tail_.append(bytes);

  std::optional<size_t> best_index;
  size_t best_end = 0;
  size_t best_length = 0;
  for (size_t i = 0; i < stop_->sequences.size(); ++i) {
    const std::string& sequence = stop_->sequences[i];
    if (sequence.empty()) continue;
    // Only matches that end in the new bytes; earlier ones have been judged.
    const size_t from = seen + 1 > sequence.size() ? seen + 1 - sequence.size() : 0;
    const size_t found = tail_.find(sequence, from);
    if (found == std::string::npos) continue;
    const size_t end = found + sequence.size();
    const bool better = !best_index.has_value() || end < best_end ||
                        (end == best_end && sequence.size() > best_length);
    if (better) {
      best_index = i;
      best_end = end;
      best_length = sequence.size();
    }
  }
  std::optional<StopVerdict> verdict;
  if (best_index.has_value() && num_output_tokens_ >= stop_->min_output_tokens) {
    const size_t kept = stop_->include_stop ? best_end : best_end - best_length;
    verdict.emplace();
    verdict->reason = FinishReason::kStopSequence;
    verdict->matched_sequence = static_cast<int32_t>(*best_index);
    verdict->text_bytes = num_text_bytes_ - static_cast<int64_t>(tail_.size() - kept);
  }
  if (tail_.size() >= longest_sequence_) tail_.erase(0, tail_.size() - (longest_sequence_ - 1));
  return verdict;
}

}  // namespace flashquant
