// StepRunner: runs the steps that the scheduler plans. A step has two halves, so that the next one
// can be launched before the last one is collected (EngineConfig::run_ahead).
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/scheduler/step_plan.h"

namespace flashquant {

// The host's time in parts of a step; the rest of it is the model's forward pass.
struct StepTimes {
  Duration upload{};    // the step's arrays made and brought to the backend
  Duration sample{};    // logits to token ids
  Duration download{};  // results back to the host
  // By the clock of what the model runs on.
  Duration device_layers{};
  Duration device_head{};
  Duration device_sampling{};
};

// Engine thread only. At most two launched steps are uncollected at any time.
class StepRunner {
 public:
  virtual ~StepRunner() = default;

  // Queues the step. Copies what it needs out of the plan before it returns. An error is final for
  // the engine.
  virtual absl::Status Launch(const StepPlan& plan) = 0;
  // The result of the oldest launched, uncollected step.
  virtual absl::StatusOr<StepResult> Collect() = 0;
  // Of the step that was collected last; zeros where the runner cannot tell parts apart.
  virtual StepTimes last_times() const { return {}; }
};

}  // namespace flashquant
