// Watchdogs of a serving process: a step that does not end, a listener that does not answer. They
// only tell; serve_process.cc decides how the process ends.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "engine/base/clock.h"
#include "engine/engine.h"
#include "kernels/base/mutex.h"

namespace flashquant {

// How long one step has been under way. Time counts in looks: a gap between two looks (the process
// was stopped, the machine slept) counts as two intervals at most, so waking up is no failure.
class StuckStepDetector final {
 public:
  StuckStepDetector(Duration limit, Duration interval) : limit_(limit), interval_(interval) {}
  // To be called about every `interval`. True when the step is stuck.
  bool Look(const EngineProgress& progress, TimePoint now);

 private:
  const Duration limit_;
  const Duration interval_;
  int64_t turns_ = -1;
  TimePoint last_look_{};
  Duration stuck_for_{};
};

// Calls `check` every `interval` on a thread of its own, until it returns true or this is
// destroyed, which waits for a check that runs.
class PeriodicCheck final {
 public:
  PeriodicCheck(Duration interval, std::function<bool()> check);
  ~PeriodicCheck();
  PeriodicCheck(const PeriodicCheck&) = delete;
  PeriodicCheck& operator=(const PeriodicCheck&) = delete;

 private:
  void Run();

  const Duration interval_;
  const std::function<bool()> check_;
  Mutex mu_;
  CondVar changed_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// Calls `on_deaf`, once, when `answers` was false three times in a row. gRPC 1.51 never accepts
// again after one time without a file descriptor, and does not notice.
std::unique_ptr<PeriodicCheck> WatchListenerAnswers(Duration interval,
                                                    std::function<bool()> answers,
                                                    std::function<void()> on_deaf);
// Calls `on_stuck`, once, when one step has been under way for `limit`.
std::unique_ptr<PeriodicCheck> WatchStepProgress(Duration limit,
                                                 std::function<EngineProgress()> progress,
                                                 std::function<void()> on_stuck);

}  // namespace flashquant
