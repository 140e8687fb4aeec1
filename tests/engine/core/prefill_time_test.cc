// What a token of a prompt is said to cost after which steps, and what the engine makes of it.
#include "engine/prefill_time.h"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/mutex.h"
#include "tests/engine/core/engine_fixture.h"

namespace flashquant {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

TimePoint At(int ms) { return TimePoint(milliseconds(ms)); }

TEST(PrefillTimeTest, IsZeroUntilAPrefillStepWasSeen) {
  PrefillTime time;
  EXPECT_EQ(time.per_token(), Duration::zero());
  time.StepFinished(StepPhase::kDecode, 8, At(0), At(10));
  EXPECT_EQ(time.per_token(), Duration::zero());
  time.StepFinished(StepPhase::kPrefill, 100, At(10), At(30));
  EXPECT_EQ(time.per_token(), microseconds(200));
}

TEST(PrefillTimeTest, DecodesDoNotCount) {
  PrefillTime time;
  time.StepFinished(StepPhase::kPrefill, 100, At(0), At(20));
  time.StepFinished(StepPhase::kDecode, 1, At(20), At(40));
  EXPECT_EQ(time.per_token(), microseconds(200));
}

TEST(PrefillTimeTest, FollowsTheLastStepsAndSmallOnesCountLess) {
  PrefillTime time;
  time.StepFinished(StepPhase::kPrefill, 100, At(0), At(20));
  time.StepFinished(StepPhase::kPrefill, 2, At(20), At(22));  // 1000 microseconds a token
  EXPECT_LT(time.per_token(), microseconds(210));
  for (int ms = 100; ms < 10'000; ms += 100) {
    time.StepFinished(StepPhase::kPrefill, 100, At(ms), At(ms + 50));
  }
  EXPECT_NEAR(ToSeconds(time.per_token()), 500e-6, 1e-6);
}

TEST(PrefillTimeTest, AStepLaunchedAheadBeginsWhenTheOneBeforeHasEnded) {
  PrefillTime time;
  time.StepFinished(StepPhase::kDecode, 8, At(0), At(10));
  time.StepFinished(StepPhase::kPrefill, 100, At(1), At(30));
  EXPECT_EQ(time.per_token(), microseconds(200));
}

class EnginePatienceTest : public EngineTest {
 protected:
  // Who begins first, 'l' or 's': a prompt of 12 tokens, or one of 3 that comes 5 ms later. A token
  // takes 1 ms, and one request runs at a time.
  std::string OrderOfALongAndALaterShortPrompt(double patience) {
    EngineConfig config = SmallConfig();
    config.max_sequences = 1;
    config.prompt_patience = patience;
    Start(config);
    Mutex mu;
    std::string order;
    runner_->OnLaunch([&](const StepPlan& plan) {
      MutexLock lock(&mu);
      if (plan.num_tokens == 12) order += 'l';
      if (plan.num_tokens == 3) order += 's';
    });
    runner_->CloseGate();
    const auto first = Submit(Request("first", std::vector<int32_t>(10, 1), 1));
    runner_->WaitUntilAtGate();
    clock_.Advance(milliseconds(10));
    runner_->OpenGate();
    ReadAll(*first);
    runner_->CloseGate();
    const auto before = Submit(Request("before", {2}, 1));
    runner_->WaitUntilAtGate();
    const auto longer = Submit(Request("longer", std::vector<int32_t>(12, 3), 1));
    clock_.Advance(milliseconds(5));
    const auto shorter = Submit(Request("shorter", std::vector<int32_t>(3, 4), 1));
    runner_->OpenGate();
    for (const auto& stream : {before, longer, shorter}) ReadAll(*stream);
    ExpectIdle();
    return order;
  }
};

TEST_F(EnginePatienceTest, ALaterShortPromptGoesFirstWhenTheLongOnesPatienceCoversIt) {
  EXPECT_EQ(OrderOfALongAndALaterShortPrompt(1), "sl");
}

TEST_F(EnginePatienceTest, ALaterShortPromptWaitsWhenPatienceIsTooShortOrOff) {
  EXPECT_EQ(OrderOfALongAndALaterShortPrompt(0.5), "ls");
  EXPECT_EQ(OrderOfALongAndALaterShortPrompt(0), "ls");
}

}  // namespace
}  // namespace flashquant
