// BackgroundTask: one piece of work at a time on a thread of its own.
#pragma once

#include <functional>
#include <thread>

#include "absl/status/status.h"

namespace flashquant {

class BackgroundTask final {
 public:
  BackgroundTask() = default;
  // Waits.
  ~BackgroundTask();
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

  // After Wait, if there was a task before. Where the system gives no thread, the work is done at
  // once.
  void Start(std::function<absl::Status()> work);
  // For the task to end, and returns what it did; OK when there is none.
  absl::Status Wait();

 private:
  std::thread thread_;
  absl::Status status_;
};

}  // namespace flashquant
