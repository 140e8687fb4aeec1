// How long prompts let shorter ones pass.
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

// A step of priority is worth two seconds; a token is worth ten milliseconds of patience.
class SchedulerPatienceTest : public SchedulerTest {
 protected:
  SequenceId Ask(int prompt_tokens, int at_ms, int priority = 0, int first_token = 5) {
    std::vector<int32_t> prompt(static_cast<size_t>(prompt_tokens), first_token);
    return Add({.prompt_tokens = std::move(prompt),
                .max_output_tokens = 1,
                .priority = priority,
                .arrival = TimePoint(milliseconds(at_ms)),
                .patience_per_token = milliseconds(10)});
  }
  static SchedulerConfig OneAtATime() {
    SchedulerConfig config = Config();
    config.max_sequences = 1;
    config.token_budget = 512;
    config.num_blocks = 401;
    return config;
  }
};

TEST_F(SchedulerPatienceTest, AShorterPromptPassesALongerOneThatArrivedALittleEarlier) {
  Start(OneAtATime());
  const SequenceId longer = Ask(40, 0), shorter = Ask(10, 200);
  EXPECT_THAT(Step(), ElementsAre(Pair(shorter, 10)));
  EXPECT_THAT(Step(), ElementsAre(Pair(longer, 40)));
}

TEST_F(SchedulerPatienceTest, ALongPromptIsPassedOnlyByThoseWithinItsPatience) {
  Start(OneAtATime());
  const SequenceId longer = Ask(40, 0);                         // until 400
  const SequenceId within = Ask(1, 389), beyond = Ask(1, 391);  // 10 each of their own
  for (SequenceId id : {within, longer, beyond}) EXPECT_EQ(Step().at(0).first, id);
}

TEST_F(SchedulerPatienceTest, ItsPatienceEndsAtHalfAStepOfPriority) {
  Start(OneAtATime());
  const SequenceId longer = Ask(500, 0);
  const SequenceId within = Ask(1, 989), beyond = Ask(1, 991);
  for (SequenceId id : {within, longer, beyond}) EXPECT_EQ(Step().at(0).first, id);
}

TEST_F(SchedulerPatienceTest, AStepOfPriorityIsWorthMoreThanAnyLength) {
  Start(OneAtATime());
  const SequenceId shorter = Ask(1, 0), longer = Ask(500, 0, 1);
  for (SequenceId id : {longer, shorter}) EXPECT_EQ(Step().at(0).first, id);
}

TEST_F(SchedulerPatienceTest, TokensThatTheCacheHasDoNotCount) {
  SchedulerConfig config = OneAtATime();
  config.prefix_cache = true;
  Start(config);
  const SequenceId same = Ask(40, 0);
  EXPECT_THAT(Step(), ElementsAre(Pair(same, 40)));
  const SequenceId cached = Ask(41, 100), uncached = Ask(10, 150, 0, 6);
  EXPECT_THAT(Step(), ElementsAre(Pair(cached, 1)));
  EXPECT_THAT(Step(), ElementsAre(Pair(uncached, 10)));
}

TEST_F(SchedulerPatienceTest, ALongPromptThatHasBegunLetsAShorterOneGoFirst) {
  Start(Config());
  const SequenceId longer = Ask(20, 0);
  EXPECT_THAT(Step(), ElementsAre(Pair(longer, 8)));
  const SequenceId shorter = Ask(5, 100);
  EXPECT_THAT(Step(), ElementsAre(Pair(shorter, 5), Pair(longer, 3)));
  EXPECT_THAT(Step(), ElementsAre(Pair(longer, 8)));
}

TEST_F(SchedulerPatienceTest, WhenNobodyElseFitsThePromptThatHasBegunGoesOn) {
  SchedulerConfig config = Config();
  config.num_blocks = 12;  // 11 usable; the long one has ten
  Start(config);
  const SequenceId longer = Ask(20, 0);
  EXPECT_THAT(Step(), ElementsAre(Pair(longer, 8)));
  Ask(5, 100);
  EXPECT_THAT(Step(), ElementsAre(Pair(longer, 8)));
}

}  // namespace
}  // namespace flashquant
