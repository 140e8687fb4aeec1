// ThreadPool: a fixed set of workers and ParallelFor over numbered tasks.
//
// Made for the many short regions of a decode step: a worker spins for some microseconds after a
// region, so that the next one starts at once, and then sleeps; an idle pool burns no CPU. Tasks
// are claimed one by one from a shared counter, so which thread runs a task is not fixed: results
// must not depend on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "kernels/base/mutex.h"

namespace flashquant {

// Cores that this process may use: its affinity mask, at least 1.
int32_t UsableCores();

class ThreadPool final {
 public:
  // num_threads >= 1, the calling thread included: starts num_threads - 1 workers, fewer when the
  // system refuses a thread.
  explicit ThreadPool(int32_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t num_threads() const { return static_cast<int32_t>(workers_.size()) + 1; }

  // Calls body(task, thread) for every task in [0, num_tasks), thread in [0, num_threads()), and
  // returns when all are done. The caller works too, as thread 0. Only one thread may call this,
  // and not from inside a body; a body must not throw.
  template <typename Body>
  void ParallelFor(int64_t num_tasks, const Body& body) {
    if (num_tasks <= 1 || workers_.empty()) {
      for (int64_t task = 0; task < num_tasks; ++task) body(task, 0);
      return;
    }
    RunRegion(num_tasks, &body, [](const void* context, int64_t task, int32_t thread) {
      (*static_cast<const Body*>(context))(task, thread);
    });
  }

 private:
  using TaskFunction = void (*)(const void* context, int64_t task, int32_t thread);

  void RunRegion(int64_t num_tasks, const void* context, TaskFunction function);
  void RunTasks(int32_t thread);
  void WorkerLoop(int32_t thread);
  // Waits until a region other than `last` is open; 0 when the pool is to stop.
  uint64_t AwaitRegion(uint64_t last);

  // The region's data: written before open_ is set, read only by threads counted in inside_.
  int64_t num_tasks_ = 0;
  const void* context_ = nullptr;
  TaskFunction function_ = nullptr;
  uint64_t region_ = 0;  // caller's thread only

  // Own cache lines: every thread writes to these.
  alignas(64) std::atomic<int64_t> next_task_{0};
  alignas(64) std::atomic<int32_t> inside_{0};
  alignas(64) std::atomic<uint64_t> open_{0};  // number of the open region, 0 = none
  std::atomic<int32_t> sleepers_{0};
  std::atomic<bool> stop_{false};

  Mutex mu_;
  CondVar wake_;  // a region was opened, or stop_ set
  std::vector<std::thread> workers_;
};

}  // namespace flashquant
