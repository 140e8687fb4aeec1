// PromptPatience: how long a prompt lets shorter ones pass: a number of times what it will take
// itself, as the steps so far tell.
#pragma once

#include <cstdint>

#include "engine/base/clock.h"
#include "engine/scheduler/step_plan.h"

namespace flashquant {

// Engine thread only.
class PromptPatience final {
 public:
  // `factor`: how many times its own prefill; 0 = none.
  explicit PromptPatience(double factor) : factor_(factor) {}

  // A step of `num_tokens` (>= 1) ended.
  void StepFinished(StepPhase phase, int32_t num_tokens, Duration duration);
  // Of a prompt, for each of its tokens. Zero before the first prefill.
  Duration per_token() const;

 private:
  const double factor_;
  // Of prefill steps, each weighing less than the one after it.
  double seconds_ = 0;
  double tokens_ = 0;
};

}  // namespace flashquant
