// StepRunner: runs the steps that the scheduler plans. A step has two halves, so that the next one
// can be launched before the last one is collected (EngineConfig::run_ahead).
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/scheduler/step_plan.h"

namespace flashquant {

// Engine thread only. At most two launched steps are uncollected at any time.
class StepRunner {
 public:
  virtual ~StepRunner() = default;

  // Queues the step. Copies what it needs out of the plan before it returns. An error is final for
  // the engine.
  virtual absl::Status Launch(const StepPlan& plan) = 0;
  // The result of the oldest launched, uncollected step.
  virtual absl::StatusOr<StepResult> Collect() = 0;
};

}  // namespace flashquant
