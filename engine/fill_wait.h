// FillWait: whether a decode step is put off a little, so that requests that arrive meanwhile get
// the rows that would be padding. Off unless EngineConfig::fill_wait_ms says so.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/base/clock.h"
#include "engine/scheduler/step_plan.h"

namespace flashquant {

// Time comes in by the calls alone. Engine thread only.
class FillWait final {
 public:
  // `longest`: of one wait, zero = off. `gap_target`: a wait ends early enough for the step to give
  // its tokens within this time after the tokens before.
  FillWait(Duration longest, Duration gap_target) : longest_(longest), gap_target_(gap_target) {}

  // `count` (>= 1) requests arrived since the last call.
  void Arrived(TimePoint now, int64_t count);
  // A step gave its tokens.
  void StepFinished(StepPhase phase, TimePoint now, Duration duration);

  // Before a step is planned that would have `rows_to_fill` rows of padding: until when to wait for
  // an arrival, or nullopt: not at all, or no longer. It is not worth it when the mean interval of
  // arrivals is longer than the wait.
  std::optional<TimePoint> Until(TimePoint now, int32_t rows_to_fill);

 private:
  const Duration longest_;
  const Duration gap_target_;
  std::optional<TimePoint> last_arrival_;
  std::optional<Duration> mean_interval_;
  TimePoint last_tokens_{};
  Duration mean_step_{};            // of decodes alone
  std::optional<TimePoint> began_;  // of the wait that is under way
};

}  // namespace flashquant
