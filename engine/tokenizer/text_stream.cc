// The matcher here sees the same bytes under the same rules as the engine's, so both find the same
// end; Finish obeys the engine in any case.
#include "engine/tokenizer/text_stream.h"

#include <algorithm>
#include <utility>

namespace flashquant {

TextStream::TextStream(const Tokenizer* tokenizer, StopConditions stop,
                       std::vector<int32_t> end_tokens)
    : tokenizer_(tokenizer),
      stop_(std::move(stop)),
      end_tokens_(std::move(end_tokens)),
      matcher_(stop_.sequences) {}

bool TextStream::EndsAnswer(int32_t token_id) const {
  const auto has = [&](const std::vector<int32_t>& ids) {
    return std::find(ids.begin(), ids.end(), token_id) != ids.end();
  };
  return has(stop_.token_ids) || (!stop_.ignore_eos && has(end_tokens_));
}

std::string TextStream::Append(int32_t token_id) {
  const std::string_view bytes = AnswerBytes(*tokenizer_, token_id);
  ++num_tokens_;
  const bool counts = num_tokens_ >= stop_.min_output_tokens;
  held_.append(bytes);
  if (counts && EndsAnswer(token_id)) frozen_ = true;
  if (frozen_) return "";
  const std::optional<StopMatch> match = matcher_.Feed(bytes, counts);
  if (!match) return ReleaseUpTo(matcher_.num_bytes() - matcher_.held_back());
  frozen_ = true;
  return ReleaseUpTo(stop_.include_stop ? match->end : match->begin);
}

std::string TextStream::Finish(std::optional<int64_t> text_bytes) {
  const int64_t num_bytes = released_bytes_ + static_cast<int64_t>(held_.size());
  std::string text = ReleaseUpTo(std::min(text_bytes.value_or(num_bytes), num_bytes));
  repair_.Flush(&text);
  return text;
}

std::string TextStream::ReleaseUpTo(int64_t end) {
  std::string text;
  if (end <= released_bytes_) return text;
  const auto num_bytes = static_cast<size_t>(end - released_bytes_);
  repair_.Append(std::string_view(held_).substr(0, num_bytes), &text);
  held_.erase(0, num_bytes);
  released_bytes_ = end;
  return text;
}

}  // namespace flashquant
