// A token id with one number: what sampling takes and gives besides ids, in one layout for the
// wire's engine types, the scheduler's plans and the backends' ops.
#pragma once

#include <cstdint>

namespace flashquant {

// Most alternatives that a request may ask for beside the logprob of the chosen token.
inline constexpr int32_t kMaxTopLogprobs = 20;

// A token of a request's history and how often it is among the output tokens; 0 = only in the
// prompt.
struct TokenCount {
  int32_t token_id = 0;
  int32_t num_outputs = 0;
};

// What is added to a token's logit.
struct TokenBias {
  int32_t token_id = 0;
  float bias = 0.0f;
};

// Natural logarithm of a token's probability.
struct TokenLogprob {
  int32_t token_id = 0;
  float logprob = 0.0f;
};

}  // namespace flashquant
