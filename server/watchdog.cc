// Monotonic time only.
#include "server/watchdog.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace flashquant {

bool StuckStepDetector::Look(const EngineProgress& progress, TimePoint now) {
  const Duration gap = now - std::exchange(last_look_, now);
  if (!progress.in_step || std::exchange(turns_, progress.turns) != progress.turns) {
    stuck_for_ = Duration::zero();
    return false;
  }
  stuck_for_ += std::min<Duration>(gap, 2 * interval_);
  return stuck_for_ >= limit_;
}

PeriodicCheck::PeriodicCheck(Duration interval, std::function<bool()> check)
    : interval_(interval), check_(std::move(check)), thread_([this] { Run(); }) {}

PeriodicCheck::~PeriodicCheck() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void PeriodicCheck::Run() {
  for (;;) {
    const TimePoint next = std::chrono::steady_clock::now() + interval_;
    {
      MutexLock lock(&mu_);
      while (!stop_ && changed_.WaitUntil(&mu_, next)) {
      }
      if (stop_) return;
    }
    if (check_()) return;
  }
}

std::unique_ptr<PeriodicCheck> WatchListenerAnswers(Duration interval,
                                                    std::function<bool()> answers,
                                                    std::function<void()> on_deaf) {
  constexpr int kFailures = 3;
  return std::make_unique<PeriodicCheck>(
      interval, [answers = std::move(answers), on_deaf = std::move(on_deaf), failed = 0]() mutable {
        failed = answers() ? 0 : failed + 1;
        if (failed < kFailures) return false;
        on_deaf();
        return true;
      });
}

std::unique_ptr<PeriodicCheck> WatchStepProgress(Duration limit,
                                                 std::function<EngineProgress()> progress,
                                                 std::function<void()> on_stuck) {
  const Duration interval = std::max<Duration>(limit / 16, std::chrono::milliseconds(1));
  return std::make_unique<PeriodicCheck>(
      interval, [progress = std::move(progress), on_stuck = std::move(on_stuck),
                 detector = StuckStepDetector(limit, interval)]() mutable {
        if (!detector.Look(progress(), std::chrono::steady_clock::now())) return false;
        on_stuck();
        return true;
      });
}

}  // namespace flashquant
