// Mutex and CondVar between real threads; nothing here waits for time to pass.
#include "kernels/base/mutex.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace flashquant {
namespace {

struct Counter {
  Mutex mu;
  CondVar changed;
  int value ABSL_GUARDED_BY(mu) = 0;
};

TEST(MutexTest, IncrementsOfFourThreadsAllCount) {
  Counter counter;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&counter] {
      for (int i = 0; i < 5000; ++i) {
        MutexLock lock(&counter.mu);
        ++counter.value;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  MutexLock lock(&counter.mu);
  EXPECT_EQ(counter.value, 20000);
}

TEST(CondVarTest, TwoThreadsHandTheTurnBackAndForth) {
  Counter counter;
  constexpr int kTurns = 200;
  const auto take_turns = [&counter](int parity) {
    for (int turn = parity; turn < kTurns; turn += 2) {
      MutexLock lock(&counter.mu);
      while (counter.value != turn) counter.changed.Wait(&counter.mu);
      ++counter.value;
      counter.changed.NotifyAll();
    }
  };
  std::thread even(take_turns, 0);
  std::thread odd(take_turns, 1);
  even.join();
  odd.join();
  MutexLock lock(&counter.mu);
  EXPECT_EQ(counter.value, kTurns);
}

TEST(CondVarTest, WaitUntilADeadlineInThePastReturnsFalseAndHoldsTheLock) {
  Counter counter;
  MutexLock lock(&counter.mu);
  EXPECT_FALSE(
      counter.changed.WaitUntil(&counter.mu, std::chrono::steady_clock::time_point::min()));
  counter.value = 1;  // still guarded: TSan and -Wthread-safety agree
  EXPECT_EQ(counter.value, 1);
}

}  // namespace
}  // namespace flashquant
