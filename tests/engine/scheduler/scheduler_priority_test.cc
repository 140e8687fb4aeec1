// Who is first: priorities, their ageing, and preemption for the sake of one.
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/scheduler/scheduler_fixture.h"

namespace flashquant {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::Pair;

class SchedulerPriorityTest : public SchedulerTest {
 protected:
  // One step of priority is worth two seconds.
  SequenceId Ask(int priority, int at_second, int prompt_tokens = 1, int max_output_tokens = 1) {
    return Add({.prompt_tokens = std::vector<int32_t>(static_cast<size_t>(prompt_tokens), 5),
                .max_output_tokens = max_output_tokens,
                .priority = priority,
                .arrival = TimePoint(seconds(at_second))});
  }
  static SchedulerConfig OneAtATime() {
    SchedulerConfig config = Config();
    config.max_sequences = 1;
    return config;
  }
};

TEST_F(SchedulerPriorityTest, HigherPrioritiesAreAdmittedFirst) {
  Start(OneAtATime());
  const SequenceId low = Ask(-10, 0), middle = Ask(0, 1), high = Ask(10, 2);
  for (SequenceId id : {high, middle, low}) EXPECT_THAT(Step(), ElementsAre(Pair(id, 1)));
}

TEST_F(SchedulerPriorityTest, EqualOnesAreServedInTheOrderOfTheirArrival) {
  Start(OneAtATime());
  const SequenceId late = Ask(3, 1), early = Ask(3, 0), same = Ask(3, 1);
  for (SequenceId id : {early, late, same}) EXPECT_THAT(Step(), ElementsAre(Pair(id, 1)));
}

TEST_F(SchedulerPriorityTest, AStepOfPriorityIsWorthTwoSecondsOfWaiting) {
  Start(OneAtATime());
  const SequenceId low = Ask(-1, 0), within = Ask(1, 3), beyond = Ask(1, 5);
  for (SequenceId id : {within, low, beyond}) EXPECT_THAT(Step(), ElementsAre(Pair(id, 1)));
}

// S6: the bound of the header, 20 * priority_ageing for the least against the greatest.
TEST_F(SchedulerPriorityTest, ALowOneIsServedWithinItsBoundUnderASteadyStreamOfHighOnes) {
  Start(OneAtATime());
  const SequenceId low = Ask(-10, 0);
  for (int second = 0; second < 60; ++second) {  // one arrives as one is served: always a queue
    Ask(10, second);
    if (second == 0) Ask(10, second);
    const auto plan = Step();
    ASSERT_EQ(plan.size(), 1u);
    if (plan[0].first != low) continue;
    EXPECT_GE(second, 39);
    EXPECT_LE(second, 42);  // what arrived before the bound is served first
    return;
  }
  FAIL() << "starved";
}

TEST_F(SchedulerPriorityTest, AHigherOneTakesTheSlotOfTheLastOfLowerPriority) {
  SchedulerConfig config = Config();
  config.max_sequences = 3;
  Start(config);
  const SequenceId a = Ask(0, 0, 2, 9), b = Ask(0, 1, 2, 9), c = Ask(0, 2, 2, 9);
  Step();
  const SequenceId equal = Ask(0, 3, 2, 9);
  EXPECT_THAT(Step(), ElementsAre(Pair(a, 1), Pair(b, 1), Pair(c, 1)));
  const SequenceId high = Ask(5, 4, 2, 9);
  EXPECT_THAT(Step(), ElementsAre(Pair(a, 1), Pair(b, 1), Pair(high, 2)));
  EXPECT_EQ(scheduler_->Find(c)->state, SequenceState::kPreempted);
  EXPECT_EQ(scheduler_->counters().preemptions_for_priority, 1);
  EXPECT_EQ(scheduler_->counters().preemptions_for_blocks, 0);
  // In its place in the order: after the high one, before those that came later.
  EXPECT_THAT(Step(), ElementsAre(Pair(high, 1), Pair(a, 1), Pair(b, 1)));
  EXPECT_TRUE(scheduler_->Release(high, ReleaseReason::kFinished));
  EXPECT_THAT(Step(), ElementsAre(Pair(a, 1), Pair(b, 1), Pair(c, 4)));
  EXPECT_EQ(scheduler_->Find(equal)->state, SequenceState::kWaiting);
}

TEST_F(SchedulerPriorityTest, TheFirstRunningOneKeepsItsPlaceWhateverArrives) {
  Start(OneAtATime());
  const SequenceId running = Ask(-10, 0, 1, 5);
  Step();
  const SequenceId high = Ask(10, 1);
  for (int i = 0; i < 4; ++i) EXPECT_THAT(Step(), ElementsAre(Pair(running, 1)));
  EXPECT_THAT(Step(), ElementsAre(Pair(high, 1)));
}

TEST_F(SchedulerPriorityTest, BlocksAreTakenOnlyIfThatIsEnough) {
  SchedulerConfig config = Config();
  config.num_blocks = 13;  // 12 usable = 24 tokens
  config.token_budget = 32;
  Start(config);
  const SequenceId a = Ask(0, 0, 8, 3), b = Ask(0, 1, 6, 3), c = Ask(0, 2, 4, 3);
  Step();
  ASSERT_EQ(scheduler_->num_running(), 3);
  ASSERT_EQ(scheduler_->blocks_used(), 9);
  // 11 blocks: more than b and c could give, and a is the first running one.
  const SequenceId large = Ask(5, 3, 22, 1);
  EXPECT_THAT(Step(), ElementsAre(Pair(a, 1), Pair(b, 1), Pair(c, 1)));
  EXPECT_EQ(scheduler_->counters().preemptions_for_priority, 0);
  EXPECT_TRUE(scheduler_->Release(large, ReleaseReason::kCancelled));
  // One block and one for each of a and b: the three of c are enough.
  ASSERT_EQ(scheduler_->blocks_used(), 12);
  const SequenceId small = Ask(5, 4, 2, 1);
  EXPECT_THAT(Step(), ElementsAre(Pair(a, 1), Pair(b, 1), Pair(small, 2)));
  EXPECT_EQ(scheduler_->Find(c)->state, SequenceState::kPreempted);
}

TEST_F(SchedulerPriorityTest, NobodyBehindALowOneThatHasAgedTakesItsPlace) {
  SchedulerConfig config = Config();
  config.max_sequences = 2;
  Start(config);
  const SequenceId a = Ask(0, 0, 1, 9), b = Ask(0, 0, 1, 9);
  Step();
  const SequenceId high = Ask(5, 11);  // five steps are ten seconds
  EXPECT_THAT(Step(), ElementsAre(Pair(a, 1), Pair(b, 1)));
  EXPECT_EQ(scheduler_->Find(high)->state, SequenceState::kWaiting);
}

TEST_F(SchedulerPriorityTest, AfterEightPreemptionsNobodyTakesItsPlace) {
  SchedulerConfig config = Config();
  config.max_sequences = 2;
  Start(config);
  Ask(10, 0, 1, 40);
  const SequenceId low = Ask(0, 0, 1, 40);
  Step();
  for (int i = 0; i < Scheduler::kMaxPreemptions; ++i) {
    Ask(9, 0);
    Step();
    ASSERT_EQ(scheduler_->Find(low)->num_preemptions, i + 1);
    Step();
    ASSERT_EQ(scheduler_->Find(low)->state, SequenceState::kRunning);
  }
  const SequenceId high = Ask(9, 0);
  Step();
  EXPECT_EQ(scheduler_->Find(low)->state, SequenceState::kRunning);
  EXPECT_EQ(scheduler_->Find(high)->state, SequenceState::kWaiting);
}

TEST_F(SchedulerPriorityTest, ASequenceInFlightIsPreemptedWithoutGivingItsBlocksAway) {
  SchedulerConfig config = Config();
  config.num_blocks = 8;  // 7 usable
  config.max_sequences = 2;
  Start(config);
  const SequenceId a = Ask(0, 0, 4, 3), b = Ask(0, 0, 4, 3);
  Schedule();
  const SequenceId high = Ask(5, 1, 6, 1);
  EXPECT_THAT(Schedule(), ElementsAre(Pair(a, 1)));  // b's blocks are still written
  EXPECT_EQ(scheduler_->Find(b)->state, SequenceState::kPreempted);
  Commit();
  EXPECT_THAT(Schedule(), ElementsAre(Pair(a, 1), Pair(high, 6)));
  EXPECT_EQ(scheduler_->counters().preemptions_for_priority, 1);
  Commit();
  Commit();
}

}  // namespace
}  // namespace flashquant
