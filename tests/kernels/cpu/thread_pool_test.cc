// The pool runs every task exactly once, reuses its workers, and burns no CPU while it is idle.
#include "kernels/cpu/thread_pool.h"

#include <atomic>
#include <ctime>
#include <memory>
#include <vector>

#include "gtest/gtest.h"

namespace flashquant {
namespace {

double Seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// CPU time of all threads but the calling one.
double OtherThreadsCpuSeconds() {
  return Seconds(CLOCK_PROCESS_CPUTIME_ID) - Seconds(CLOCK_THREAD_CPUTIME_ID);
}

TEST(ThreadPoolTest, EveryTaskRunsOnceForAnyNumberOfThreadsAndTasks) {
  for (const int32_t threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (const int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      std::atomic<bool> threads_in_range{true};
      pool.ParallelFor(tasks, [&](int64_t task, int32_t thread) {
        ++runs[static_cast<size_t>(task)];
        if (thread < 0 || thread >= threads) threads_in_range = false;
      });
      for (const std::atomic<int>& count : runs) EXPECT_EQ(count.load(), 1);
      EXPECT_TRUE(threads_in_range);
    }
  }
}

TEST(ThreadPoolTest, RegionsFollowEachOtherWithoutLosingWrites) {
  ThreadPool pool(4);
  int64_t sum = 0;
  std::vector<int64_t> parts(16);
  for (int64_t region = 0; region < 20000; ++region) {
    pool.ParallelFor(16, [&](int64_t task, int32_t /*thread*/) {
      parts[static_cast<size_t>(task)] = region + task;
    });
    for (const int64_t part : parts) sum += part;
  }
  EXPECT_EQ(sum, int64_t{16} * 20000 * 19999 / 2 + int64_t{20000} * 120);
}

TEST(ThreadPoolTest, PoolsMayDieWhileWorkersSpinOrSleep) {
  for (int i = 0; i < 200; ++i) {
    ThreadPool pool(3);
    std::atomic<int> runs{0};
    if (i % 2 == 0) pool.ParallelFor(3, [&](int64_t, int32_t) { ++runs; });
    EXPECT_EQ(runs.load(), i % 2 == 0 ? 3 : 0);
  }
}

TEST(ThreadPoolTest, IdleWorkersUseNoCpu) {
  ThreadPool pool(4);
  pool.ParallelFor(8, [](int64_t, int32_t) {});
  const double before = OtherThreadsCpuSeconds();
  const double start = Seconds(CLOCK_MONOTONIC);
  while (Seconds(CLOCK_MONOTONIC) < start + 0.2) continue;
  EXPECT_LT(OtherThreadsCpuSeconds() - before, 0.05);
}

TEST(ThreadPoolTest, UsableCoresIsAtLeastOne) { EXPECT_GE(UsableCores(), 1); }

}  // namespace
}  // namespace flashquant
