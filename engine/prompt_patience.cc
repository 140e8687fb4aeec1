#include "engine/prompt_patience.h"

namespace flashquant {
namespace {

constexpr double kFade = 15.0 / 16;  // of what came before, with each step

}  // namespace

void PromptPatience::StepFinished(StepPhase phase, int32_t num_tokens, Duration duration) {
  if (phase != StepPhase::kPrefill) return;
  seconds_ = seconds_ * kFade + ToSeconds(duration);
  tokens_ = tokens_ * kFade + num_tokens;
}

Duration PromptPatience::per_token() const {
  return tokens_ > 0 ? DurationFromSeconds(factor_ * seconds_ / tokens_) : Duration::zero();
}

}  // namespace flashquant
