// TokenCounts: which tokens a sequence has seen, for its penalties.
//
// Which ones count: a repetition penalty is for every token of the prompt and of the answer, once
// however often it occurs; presence and frequency penalties are for tokens of the answer alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/request.h"

namespace flashquant {

// Per sequence; keeps nothing when the sampling parameters need no counts.
class TokenCounts final {
 public:
  TokenCounts(const SamplingParams& sampling, std::span<const int32_t> prompt_tokens);

  void AddOutput(int32_t token_id);
  // By rising id, each once. Valid until the next AddOutput.
  std::span<const TokenCount> entries() const { return entries_; }

 private:
  const bool needed_;
  std::vector<TokenCount> entries_;
};

}  // namespace flashquant
