// PrefillTime: what a token of a prompt costs, from the steps that have run. Patience in the order
// of prompts (Scheduler) is measured in it.
#pragma once

#include <cstdint>

#include "engine/base/clock.h"
#include "engine/scheduler/step_plan.h"

namespace flashquant {

// Time comes in by the calls alone. Engine thread only.
class PrefillTime final {
 public:
  // A step of `num_tokens` rows (>= 1) was launched and has now given its tokens.
  void StepFinished(StepPhase phase, int32_t num_tokens, TimePoint launched, TimePoint now);

  // Mean over the last ten or so prefill steps, large ones counting more. Zero before the first.
  Duration per_token() const;

 private:
  TimePoint last_finished_{};
  double mean_tokens_ = 0;
  double mean_seconds_ = 0;
};

}  // namespace flashquant
