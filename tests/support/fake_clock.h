// FakeClock: time that moves only when the test says so.
#pragma once

#include <atomic>
#include <chrono>

#include "engine/base/clock.h"

namespace flashquant {

// Any thread.
class FakeClock final : public Clock {
 public:
  TimePoint Now() const override { return TimePoint(Duration(ticks_.load())); }
  void Advance(Duration duration) { ticks_.fetch_add(duration.count()); }

 private:
  std::atomic<Duration::rep> ticks_{std::chrono::hours(1) / Duration(1)};
};

}  // namespace flashquant
