// A sorted list: a new token moves a few kilobytes at most, and backends read it in order.
#include "engine/scheduler/token_counts.h"

#include <algorithm>

namespace flashquant {

TokenCounts::TokenCounts(const SamplingParams& sampling, std::span<const int32_t> prompt_tokens)
    : needed_(sampling.NeedsTokenCounts()) {
  if (sampling.repetition_penalty == 1.0f) return;
  std::vector<int32_t> ids(prompt_tokens.begin(), prompt_tokens.end());
  std::ranges::sort(ids);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  entries_.reserve(ids.size());
  for (const int32_t id : ids) entries_.push_back({.token_id = id, .num_outputs = 0});
}

void TokenCounts::AddOutput(int32_t token_id) {
  if (!needed_) return;
  const auto place = std::ranges::lower_bound(entries_, token_id, {}, &TokenCount::token_id);
  if (place != entries_.end() && place->token_id == token_id) {
    ++place->num_outputs;
  } else {
    entries_.insert(place, {.token_id = token_id, .num_outputs = 1});
  }
}

}  // namespace flashquant
