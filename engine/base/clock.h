// Time as the engine sees it; tests put in a fake one (tests/support/fake_clock.h).
#pragma once

#include <chrono>

namespace flashquant {

// Monotonic: a wall clock that jumps must neither fire a timeout nor make a latency negative.
using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

// Safe from any thread.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() const = 0;
};

class SteadyClock final : public Clock {
 public:
  TimePoint Now() const override { return std::chrono::steady_clock::now(); }
};

// Toward zero. `seconds` is finite and within +-292 years.
inline Duration DurationFromSeconds(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

inline double ToSeconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace flashquant
