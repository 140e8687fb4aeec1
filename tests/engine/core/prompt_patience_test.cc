// How long a token lets others pass, by the steps so far.
#include "engine/prompt_patience.h"

#include <chrono>

#include "gtest/gtest.h"

namespace flashquant {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

TEST(PromptPatienceTest, IsTheFactorTimesWhatATokenOfPrefillTakes) {
  PromptPatience patience(4);
  patience.StepFinished(StepPhase::kPrefill, 100, milliseconds(20));
  EXPECT_EQ(patience.per_token(), microseconds(800));
}

TEST(PromptPatienceTest, IsNoneBeforeTheFirstPrefill) {
  PromptPatience patience(4);
  EXPECT_EQ(patience.per_token(), Duration::zero());
  patience.StepFinished(StepPhase::kDecode, 8, milliseconds(20));
  EXPECT_EQ(patience.per_token(), Duration::zero());
}

TEST(PromptPatienceTest, IsOffWithAFactorOfZero) {
  PromptPatience patience(0);
  patience.StepFinished(StepPhase::kPrefill, 100, milliseconds(20));
  EXPECT_EQ(patience.per_token(), Duration::zero());
}

TEST(PromptPatienceTest, FollowsAMachineThatBecomesSlower) {
  PromptPatience patience(1);
  for (int i = 0; i < 100; ++i) patience.StepFinished(StepPhase::kPrefill, 100, milliseconds(10));
  for (int i = 0; i < 100; ++i) patience.StepFinished(StepPhase::kPrefill, 100, milliseconds(30));
  EXPECT_GT(patience.per_token(), microseconds(295));
  EXPECT_LE(patience.per_token(), microseconds(300));
}

TEST(PromptPatienceTest, LongStepsCountForMoreThanShortOnes) {
  PromptPatience patience(1);
  for (int i = 0; i < 200; ++i) {
    patience.StepFinished(StepPhase::kPrefill, 2, milliseconds(2));     // 1 ms a token
    patience.StepFinished(StepPhase::kPrefill, 198, milliseconds(38));  // 0.19 ms
  }
  EXPECT_NEAR(ToSeconds(patience.per_token()), 0.0002, 0.00001);
}

}  // namespace
}  // namespace flashquant
