// When a step waits for arrivals, and when it no longer does.
#include "engine/fill_wait.h"

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/mutex.h"
#include "tests/engine/core/engine_fixture.h"

namespace flashquant {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;

TimePoint At(int ms) { return TimePoint(milliseconds(ms)); }

// Requests each 4 ms, steps of 2 ms, tokens given at 100 ms.
FillWait Busy(int longest_ms, int gap_target_ms) {
  FillWait wait{milliseconds(longest_ms), milliseconds(gap_target_ms)};
  for (int ms = 80; ms <= 100; ms += 4) wait.Arrived(At(ms), 1);
  wait.StepFinished(StepPhase::kDecode, At(100), milliseconds(2));
  return wait;
}

TEST(FillWaitTest, WaitsUntilItsLongestTime) {
  FillWait wait = Busy(10, 1000);
  EXPECT_EQ(wait.Until(At(101), 3), At(111));
  EXPECT_EQ(wait.Until(At(105), 3), At(111));  // since it began, not since now
  EXPECT_EQ(wait.Until(At(111), 3), std::nullopt);
  EXPECT_EQ(wait.Until(At(112), 3), At(122));  // the next step's own
}

TEST(FillWaitTest, IsOffByDefaultAndWithoutPadding) {
  FillWait off = Busy(0, 1000);
  EXPECT_EQ(off.Until(At(101), 3), std::nullopt);
  FillWait wait = Busy(10, 1000);
  EXPECT_EQ(wait.Until(At(101), 0), std::nullopt);
}

TEST(FillWaitTest, TheNextTokensComeWithinTheGapTarget) {
  FillWait wait = Busy(10, 9);
  EXPECT_EQ(wait.Until(At(101), 3), At(107));  // the step takes two more
  EXPECT_EQ(wait.Until(At(107), 3), std::nullopt);
  FillWait late = Busy(10, 9);
  EXPECT_EQ(late.Until(At(108), 3), std::nullopt);
}

TEST(FillWaitTest, DoesNotWaitForWhatSeldomComes) {
  FillWait wait = Busy(3, 1000);  // 4 ms between two arrivals
  EXPECT_EQ(wait.Until(At(101), 3), std::nullopt);
  FillWait nothing_known{milliseconds(10), milliseconds(1000)};
  nothing_known.StepFinished(StepPhase::kDecode, At(100), milliseconds(2));
  EXPECT_EQ(nothing_known.Until(At(101), 3), std::nullopt);
}

TEST(FillWaitTest, SeveralArrivalsAtOnceShareTheirInterval) {
  FillWait wait{milliseconds(5), milliseconds(1000)};
  wait.Arrived(At(80), 1);
  wait.Arrived(At(100), 5);
  EXPECT_EQ(wait.Until(At(101), 3), At(106));
}

using EngineFillWaitTest = EngineTest;

TEST_F(EngineFillWaitTest, AStepTakesWhoArrivesDuringTheWaitAlong) {
  EngineConfig config = SmallConfig();
  config.row_multiple = 8;
  config.fill_wait_ms = 20;
  config.gap_target_ms = 1000;
  Start(config);
  Mutex mu;
  std::vector<size_t> sequences;  // of each step
  runner_->OnLaunch([&](const StepPlan& plan) {
    MutexLock lock(&mu);
    sequences.push_back(plan.sequences.size());
  });
  // Two arrivals, so that an interval is known; the clock stands still but for the test.
  ReadAll(*Submit(Request("a", {1, 2}, 1)));
  clock_.Advance(milliseconds(4));
  const auto first = Submit(Request("b", {1, 2}, 2));
  while (first->WaitAndTake().token_ids.empty()) {
  }
  // The engine has looked at its next step once more, and not begun it.
  const int64_t turns = engine().progress().turns;
  while (engine().progress().turns < turns + 2) std::this_thread::yield();
  const auto second = Submit(Request("c", {1, 2}, 1));
  FQ_EXPECT_OK(ReadAll(*second).finished.status);
  FQ_EXPECT_OK(ReadAll(*first).finished.status);
  MutexLock lock(&mu);
  EXPECT_THAT(sequences, ElementsAre(1, 1, 2));
}

TEST_F(EngineFillWaitTest, AStepDoesNotWaitLongerThanItMay) {
  EngineConfig config = SmallConfig();
  config.row_multiple = 8;
  config.fill_wait_ms = 20;
  Start(config);
  ReadAll(*Submit(Request("a", {1, 2}, 1)));
  clock_.Advance(milliseconds(4));
  const auto stream = Submit(Request("b", {1, 2}, 5));
  for (bool finished = false; !finished;) {
    clock_.Advance(milliseconds(20));
    engine().NotifyCancelled();
    finished = stream->Take().finished.has_value();
  }
  EXPECT_EQ(runner_->num_launched(), 6);
}

}  // namespace
}  // namespace flashquant
