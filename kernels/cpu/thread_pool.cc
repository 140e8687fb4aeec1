// A region is closed by the caller once every task is claimed; a worker that wakes too late finds
// it closed and leaves. So a sleeping worker never delays the caller. Worker and caller meet in two
// sequentially consistent variables: the worker counts itself in before it looks whether the region
// is open, the caller closes before it looks who is inside; one of them sees the other.
#include "kernels/cpu/thread_pool.h"

#include <sched.h>

#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flashquant {
namespace {

// About 50 microseconds: longer than the gap between two ops of a step, far shorter than a step of
// the engine that has nothing to do.
constexpr int kSpinRounds = 1200;
// The caller's wait for the last task: spin this long, then let another thread have the core.
constexpr int kSpinRoundsBeforeYield = 4000;

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int32_t UsableCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) {
    const int count = CPU_COUNT(&cores);
    if (count > 0) return count;
  }
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int32_t>(count);
}

ThreadPool::ThreadPool(int32_t num_threads) {
  for (int32_t thread = 1; thread < num_threads; ++thread) {
    try {
      workers_.emplace_back([this, thread] { WorkerLoop(thread); });
    } catch (const std::system_error&) {
      break;  // no more threads to be had: those there are do the work
    }
  }
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&mu_);
    stop_.store(true);
  }
  wake_.NotifyAll();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::RunRegion(int64_t num_tasks, const void* context, TaskFunction function) {
  num_tasks_ = num_tasks;
  context_ = context;
  function_ = function;
  next_task_.store(0, std::memory_order_relaxed);
  open_.store(++region_);
  if (sleepers_.load() > 0) {
    // Taking the lock makes sure that a worker between its check and its wait is not missed.
    { MutexLock lock(&mu_); }
    wake_.NotifyAll();
  }
  RunTasks(0);
  open_.store(0);
  for (int round = 0; inside_.load() != 0; ++round) {
    if (round < kSpinRoundsBeforeYield) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::RunTasks(int32_t thread) {
  while (true) {
    const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= num_tasks_) return;
    function_(context_, task, thread);
  }
}

void ThreadPool::WorkerLoop(int32_t thread) {
  uint64_t last = 0;
  while (true) {
    const uint64_t region = AwaitRegion(last);
    if (region == 0) return;
    inside_.fetch_add(1);
    const uint64_t still_open = open_.load();
    if (still_open != 0) {
      last = still_open;
      RunTasks(thread);
    }
    inside_.fetch_sub(1);
  }
}

uint64_t ThreadPool::AwaitRegion(uint64_t last) {
  const auto ready = [&] {
    const uint64_t open = open_.load();
    return (open != 0 && open != last) ? open : 0;
  };
  for (int round = 0; round < kSpinRounds; ++round) {
    const uint64_t open = ready();
    if (open != 0) return open;
    if (stop_.load(std::memory_order_relaxed)) return 0;
    Pause();
  }
  MutexLock lock(&mu_);
  sleepers_.fetch_add(1);
  uint64_t open = 0;
  while (!stop_.load() && (open = ready()) == 0) wake_.Wait(&mu_);
  sleepers_.fetch_sub(1);
  return stop_.load() ? 0 : open;
}

}  // namespace flashquant
