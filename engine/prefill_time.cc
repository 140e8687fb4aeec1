#include "engine/prefill_time.h"

#include <algorithm>

namespace flashquant {
namespace {

// Weight of the newest value in the running means.
constexpr double kWeight = 1.0 / 8;

}  // namespace

void PrefillTime::StepFinished(StepPhase phase, int32_t num_tokens, TimePoint launched,
                               TimePoint now) {
  // With run-ahead a step is launched while the one before still runs.
  const double seconds = ToSeconds(now - std::max(launched, last_finished_));
  last_finished_ = now;
  if (phase != StepPhase::kPrefill) return;
  const double weight = mean_tokens_ == 0 ? 1 : kWeight;
  mean_tokens_ += (num_tokens - mean_tokens_) * weight;
  mean_seconds_ += (seconds - mean_seconds_) * weight;
}

Duration PrefillTime::per_token() const {
  if (mean_tokens_ == 0) return Duration::zero();
  return DurationFromSeconds(mean_seconds_ / mean_tokens_);
}

}  // namespace flashquant
