// Short prompts first, within a bound: patience, one order for prompts that have begun and those to
// be admitted, and when a chunk leaves room to those behind it.
#include <chrono>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/scheduler/scheduler_fixture.h"

namespace flashquant {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::Pair;

class SchedulerPatienceTest : public SchedulerTest {
 protected:
  // A step of priority is worth 2000 ms, so nobody's patience is longer than 1000 ms.
  SequenceId Ask(int prompt_tokens, int at_ms, int patience_ms_per_token = 10, int priority = 0,
                 int token = 5) {
    return Add({.prompt_tokens = std::vector<int32_t>(static_cast<size_t>(prompt_tokens), token),
                .max_output_tokens = 1,
                .priority = priority,
                .arrival = TimePoint(milliseconds(at_ms)),
                .patience_per_token = milliseconds(patience_ms_per_token)});
  }
  static SchedulerConfig OneAtATime() {
    SchedulerConfig config = Config();
    config.max_sequences = 1;
    config.token_budget = 80;
    return config;
  }
  void ExpectOrder(const std::vector<SequenceId>& ids) {
    for (SequenceId id : ids) {
      const int tokens = scheduler_->Find(id)->num_prompt_tokens;
      EXPECT_THAT(Step(), ElementsAre(Pair(id, tokens)));
    }
  }
};

TEST_F(SchedulerPatienceTest, AShortPromptPassesALongerOneThatArrivedABitEarlier) {
  Start(OneAtATime());
  const SequenceId longer = Ask(6, 0), shorter = Ask(2, 30);
  EXPECT_EQ(scheduler_->oldest_waiting(), longer);
  ExpectOrder({shorter, longer});
}

TEST_F(SchedulerPatienceTest, ALongPromptIsPassedOnlyByThoseWithinItsPatience) {
  Start(OneAtATime());
  const SequenceId longer = Ask(6, 0), within = Ask(2, 39), beyond = Ask(2, 41);
  ExpectOrder({within, longer, beyond});
}

TEST_F(SchedulerPatienceTest, PatienceIsAtMostHalfAStepOfPriority) {
  Start(OneAtATime());
  const SequenceId longer = Ask(60, 0, 20), within = Ask(2, 959, 20), beyond = Ask(2, 961, 20);
  ExpectOrder({within, longer, beyond});
}

TEST_F(SchedulerPatienceTest, WithoutPatienceLengthDoesNotMatter) {
  Start(OneAtATime());
  const SequenceId longer = Ask(60, 0, 0), shorter = Ask(1, 0, 0);
  ExpectOrder({longer, shorter});
}

TEST_F(SchedulerPatienceTest, ALongPromptIsServedWithinItsBoundUnderASteadyStreamOfShortOnes) {
  Start(OneAtATime());
  const SequenceId longer = Ask(60, 0, 1000);
  for (int ms = 0; ms < 2000; ms += 10) {  // one arrives as one is served: always a queue
    Ask(1, ms, 1);
    const auto plan = Step();
    ASSERT_EQ(plan.size(), 1u);
    if (plan[0].first != longer) continue;
    EXPECT_EQ(ms, 1000);
    return;
  }
  FAIL() << "starved";
}

TEST_F(SchedulerPatienceTest, LengthNeverOutweighsAStepOfPriority) {
  Start(OneAtATime());
  const SequenceId low = Ask(1, 0), high = Ask(60, 900, 1000, 1);
  ExpectOrder({high, low});
}

TEST_F(SchedulerPatienceTest, WhatTheCacheHasOfAPromptDoesNotCount) {
  SchedulerConfig config = OneAtATime();
  config.prefix_cache = true;
  Start(config);
  ExpectOrder({Ask(8, 0)});
  const SequenceId fresh = Ask(3, 0, 10, 0, 6), cached = Ask(9, 19);
  EXPECT_EQ(scheduler_->Find(cached)->num_cached_when_added, 8);
  EXPECT_THAT(Step(), ElementsAre(Pair(cached, 1)));
  EXPECT_THAT(Step(), ElementsAre(Pair(fresh, 3)));
}

TEST_F(SchedulerPatienceTest, APromptThatHasBegunLetsAShorterOneGoFirstInTheNextStep) {
  Start(Config());
  const SequenceId longer = Ask(30, 0);
  EXPECT_THAT(Step(), ElementsAre(Pair(longer, 8)));
  const SequenceId shorter = Ask(3, 100), late = Ask(3, 280);
  EXPECT_THAT(Step(), ElementsAre(Pair(shorter, 3), Pair(longer, 5)));
  EXPECT_THAT(Step(), ElementsAre(Pair(longer, 5), Pair(late, 3)));
}

TEST_F(SchedulerPatienceTest, WhenTheNextOneFindsNoRoomThoseThatHaveBegunGoOn) {
  SchedulerConfig config = Config();
  config.num_blocks = 8;  // 7 usable
  Start(config);
  const SequenceId longer = Ask(12, 0);
  EXPECT_THAT(Step(), ElementsAre(Pair(longer, 8)));
  const SequenceId shorter = Ask(4, 0);  // two blocks, and one for the other
  EXPECT_THAT(Step(), ElementsAre(Pair(longer, 4)));
  EXPECT_THAT(Step(), ElementsAre(Pair(shorter, 4)));
}

TEST_F(SchedulerPatienceTest, AChunkIsNotCutWhenNobodyBehindWouldFinish) {
  Start(Config());
  const SequenceId first = Ask(30, 0, 0);
  Ask(5, 0, 0);  // half of the budget is four
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 8)));
  const SequenceId finishes = Ask(4, 0, 0);
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 4), Pair(finishes - 1, 4)));
}

TEST_F(SchedulerPatienceTest, AChunkIsCutForOneThatHasBegunAndWouldFinish) {
  Start(Config());
  const SequenceId begun = Ask(11, 100, 0);
  EXPECT_THAT(Step(), ElementsAre(Pair(begun, 8)));
  const SequenceId first = Ask(30, 0, 0);  // comes first in the order
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 5), Pair(begun, 3)));
}

TEST_F(SchedulerPatienceTest, AChunkIsNotCutForOneThatWouldFinishButFindsNoPlace) {
  SchedulerConfig config = Config();
  config.max_sequences = 2;
  Start(config);
  const SequenceId first = Ask(30, 0, 0), second = Ask(4, 0, 0);
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 4), Pair(second, 4)));
  const SequenceId third = Ask(30, 0, 0);
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 8)));
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 8)));
  EXPECT_EQ(scheduler_->Find(third)->state, SequenceState::kWaiting);
  Ask(1, 0, 0);
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 4), Pair(third, 4)));
  Ask(1, 0, 0);
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 6), Pair(third, 2)));
}

TEST_F(SchedulerPatienceTest, OnlyTheFirstOnesBehindAChunkAreLookedAt) {
  for (const int num_between : {Scheduler::kLookAhead - 1, Scheduler::kLookAhead}) {
    Start(Config());
    const SequenceId first = Ask(30, 0, 0);
    for (int i = 0; i < num_between; ++i) Ask(30, 1, 0);
    Ask(1, 2, 0);
    const bool seen = num_between < Scheduler::kLookAhead;
    EXPECT_EQ(Step().front(), std::pair(first, seen ? 4 : 8));
  }
}

}  // namespace
}  // namespace flashquant
