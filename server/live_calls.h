// LiveCalls: how many calls are between their handler and their end, and waiting until there is
// none. The drain and the leak checks ask it.
#pragma once

#include <cstdint>

#include "engine/base/clock.h"
#include "kernels/base/mutex.h"

namespace flashquant {

// Any thread.
class LiveCalls final {
 public:
  void Add() {
    MutexLock lock(&mu_);
    ++count_;
  }
  void Remove() {
    MutexLock lock(&mu_);
    if (--count_ == 0) none_.NotifyAll();
  }
  int64_t count() {
    MutexLock lock(&mu_);
    return count_;
  }
  // False when `deadline` passed first.
  bool WaitUntilNone(TimePoint deadline) {
    MutexLock lock(&mu_);
    while (count_ > 0) {
      if (!none_.WaitUntil(&mu_, deadline)) return count_ == 0;
    }
    return true;
  }

 private:
  Mutex mu_;
  CondVar none_;
  int64_t count_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace flashquant
