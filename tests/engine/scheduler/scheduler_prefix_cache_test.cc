// Prompts that begin alike: what is computed, what is shared, and when it is not.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/scheduler/scheduler_fixture.h"

namespace flashquant {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;

class SchedulerPrefixCacheTest : public SchedulerTest {
 protected:
  // Blocks of two tokens.
  static SchedulerConfig CacheConfig() {
    SchedulerConfig config = Config();
    config.prefix_cache = true;
    config.token_budget = 100;
    return config;
  }
  SequenceId Ask(std::vector<int32_t> prompt, int max_output_tokens = 1, std::string salt = "") {
    return Add({.prompt_tokens = std::move(prompt),
                .max_output_tokens = max_output_tokens,
                .cache_salt = std::move(salt)});
  }
  void RunToTheEnd() {
    while (!Step().empty()) {
    }
  }
  std::vector<int32_t> Ids(SequenceId id) {
    const auto ids = scheduler_->Find(id)->blocks.ids();
    return {ids.begin(), ids.end()};
  }
};

TEST_F(SchedulerPrefixCacheTest, ALaterPromptComputesOnlyWhatTheEarlierOneHadNot) {
  Start(CacheConfig());
  Ask({1, 2, 3, 4, 5});
  RunToTheEnd();
  EXPECT_EQ(scheduler_->blocks_used(), 0);
  EXPECT_EQ(scheduler_->blocks_cached(), 2);
  const SequenceId later = Ask({1, 2, 3, 4, 9, 9, 9}, 2);
  EXPECT_THAT(Schedule(), ElementsAre(Pair(later, 3)));
  EXPECT_EQ(plan_.sequences[0].first_position, 4);
  EXPECT_EQ(scheduler_->Find(later)->num_cached_prompt_tokens, 4);
  const FakeModel model;
  EXPECT_EQ(Commit().tokens[0].token_id, model.Answer({1, 2, 3, 4, 9, 9, 9}, 0, 1)[0]);
  const SchedulerCounters counters = scheduler_->counters();
  EXPECT_EQ(counters.prompt_tokens_computed, 5 + 3);
  EXPECT_EQ(counters.prompt_tokens_cached, 4);
  EXPECT_EQ(counters.cache_hit_tokens, 4);
  EXPECT_EQ(counters.cache_miss_tokens, 5 + 3);
}

TEST_F(SchedulerPrefixCacheTest, TheLastPromptTokenIsAlwaysComputed) {
  Start(CacheConfig());
  Ask({1, 2, 3, 4});
  RunToTheEnd();
  const SequenceId again = Ask({1, 2, 3, 4});
  EXPECT_THAT(Schedule(), ElementsAre(Pair(again, 2)));  // the whole last block
  Commit();
  const SequenceId longer = Ask({1, 2, 3, 4, 5});
  EXPECT_THAT(Schedule(), ElementsAre(Pair(longer, 1)));
  EXPECT_TRUE(plan_.sequences[0].samples);
}

TEST_F(SchedulerPrefixCacheTest, AnAnswerIsPartOfTheNextPromptsBeginning) {
  Start(CacheConfig());
  const FakeModel model;
  std::vector<int32_t> conversation = {1, 2, 3};
  const std::vector<int32_t> answer = model.Answer(conversation, 0, 4);
  Ask(conversation, 4);
  RunToTheEnd();
  conversation.insert(conversation.end(), answer.begin(), answer.end());
  conversation.push_back(7);
  const SequenceId next = Ask(conversation);
  // Seven known tokens; the last one of the answer was drawn and never computed.
  EXPECT_THAT(Schedule(), ElementsAre(Pair(next, 2)));
}

TEST_F(SchedulerPrefixCacheTest, WithoutTheCacheEverythingIsComputed) {
  SchedulerConfig config = CacheConfig();
  config.prefix_cache = false;
  Start(config);
  Ask({1, 2, 3, 4, 5});
  RunToTheEnd();
  const SequenceId again = Ask({1, 2, 3, 4, 5});
  EXPECT_THAT(Schedule(), ElementsAre(Pair(again, 5)));
  EXPECT_EQ(scheduler_->blocks_cached(), 0);
  EXPECT_EQ(scheduler_->counters().cache_miss_tokens, 0);
}

// S13
TEST_F(SchedulerPrefixCacheTest, SaltsDoNotShare) {
  Start(CacheConfig());
  Ask({1, 2, 3, 4, 5}, 1, "a");
  RunToTheEnd();
  const SequenceId other = Ask({1, 2, 3, 4, 5}, 1, "b");
  EXPECT_THAT(Step(), ElementsAre(Pair(other, 5)));
  const SequenceId same = Ask({1, 2, 3, 4, 5}, 1, "a");
  EXPECT_THAT(Step(), ElementsAre(Pair(same, 1)));
}

TEST_F(SchedulerPrefixCacheTest, NothingIsSharedBeforeItsStepIsCommitted) {
  Start(CacheConfig());
  const SequenceId first = Ask({1, 2, 3, 4, 5}, 9);
  EXPECT_THAT(Schedule(), ElementsAre(Pair(first, 5)));
  const SequenceId second = Ask({1, 2, 3, 4, 5}, 9);
  EXPECT_THAT(Schedule(), ElementsAre(Pair(first, 1), Pair(second, 5)));
  Commit();
  Commit();
}

TEST_F(SchedulerPrefixCacheTest, APromptIsSharedOnceARowOfItWasDrawnFrom) {
  SchedulerConfig config = CacheConfig();
  config.token_budget = 6;
  Start(config);
  const SequenceId first = Ask({1, 2, 3, 4, 5, 6, 7, 8, 9}, 9);
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 6)));
  EXPECT_EQ(scheduler_->Find(first)->chain.num_blocks, 0);  // no row of it was looked at yet
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 3)));
  EXPECT_EQ(scheduler_->Find(first)->chain.num_blocks, 4);
}

TEST_F(SchedulerPrefixCacheTest, TwoThatComputedTheSameAtOnceEndUpWithOneCopy) {
  Start(CacheConfig());
  const SequenceId a = Ask({1, 2, 3, 4, 5}, 4), b = Ask({1, 2, 3, 4, 6}, 4);
  Step();
  EXPECT_EQ(Ids(a)[0], Ids(b)[0]);
  EXPECT_EQ(Ids(a)[1], Ids(b)[1]);
  EXPECT_NE(Ids(a)[2], Ids(b)[2]);
  EXPECT_EQ(scheduler_->blocks_used(), 4);
  EXPECT_EQ(scheduler_->block_references(Ids(a)[0]), 2);
  RunToTheEnd();
  EXPECT_EQ(scheduler_->blocks_used(), 0);
}

TEST_F(SchedulerPrefixCacheTest, ACopyIsHeldWhileAStepInFlightReadsIt) {
  Start(CacheConfig());
  const SequenceId a = Ask({1, 2, 3, 4, 5}, 9), b = Ask({1, 2, 3, 4, 6}, 9);
  Schedule();
  Schedule();
  Commit();
  EXPECT_EQ(Ids(a)[0], Ids(b)[0]);
  EXPECT_EQ(scheduler_->blocks_used(), 6);  // b's own two are not free yet
  EXPECT_EQ(scheduler_->blocks_unaccounted(), 0);
  Commit();
  EXPECT_EQ(scheduler_->blocks_used(), 4);
}

// T12
TEST_F(SchedulerPrefixCacheTest, ASequenceThatEndsNotFiniteLeavesNothingBehind) {
  Start(CacheConfig());
  const SequenceId bad = Ask({1, 2, 3, 4, 5}, 9);
  Step();
  ASSERT_EQ(scheduler_->Find(bad)->chain.num_blocks, 2);
  const SequenceId sharer = Ask({1, 2, 3, 4, 9}, 9);
  Step();
  runner_->SetNonFinite([&](const SequenceStep& step) { return step.id == bad; });
  Step();
  EXPECT_EQ(scheduler_->Find(bad), nullptr);
  const SequenceId next = Ask({1, 2, 3, 4, 5}, 9);
  EXPECT_THAT(Step(), ElementsAre(Pair(sharer, 1), Pair(next, 5)));
  RunToTheEnd();
  // What `sharer` added stood on what was forgotten; what `next` added does not.
  const SequenceId after = Ask({1, 2, 3, 4, 9}, 1);
  EXPECT_THAT(Step(), ElementsAre(Pair(after, 1)));
}

TEST_F(SchedulerPrefixCacheTest, ARowThatIsNotFiniteSharesNothingOfItsPrompt) {
  Start(CacheConfig());
  const SequenceId bad = Ask({1, 2, 3, 4, 5}, 9);
  runner_->SetNonFinite([&](const SequenceStep& step) { return step.id == bad; });
  Step();
  EXPECT_EQ(scheduler_->blocks_cached(), 0);
  EXPECT_EQ(scheduler_->blocks_used(), 0);
}

TEST_F(SchedulerPrefixCacheTest, CachedBlocksGiveWayToWhoeverNeedsThem) {
  SchedulerConfig config = CacheConfig();
  config.num_blocks = 6;  // 5 usable = 10 tokens
  Start(config);
  Ask({1, 2, 3, 4, 5});
  RunToTheEnd();
  ASSERT_EQ(scheduler_->blocks_cached(), 2);
  const SequenceId whole_pool = Ask({7, 7, 7, 7}, 7);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(Step().size(), 1u);
  EXPECT_EQ(scheduler_->Find(whole_pool), nullptr);
  EXPECT_EQ(scheduler_->counters().preemptions_for_blocks, 0);
  const SequenceId again = Ask({1, 2, 3, 4, 5});
  EXPECT_THAT(Step(), ElementsAre(Pair(again, 5)));
}

// R14
TEST_F(SchedulerPrefixCacheTest, ARequestOfThePoolsSizeRunsOnItsOwnCachedBeginning) {
  SchedulerConfig config = CacheConfig();
  config.num_blocks = 6;
  Start(config);
  for (int round = 0; round < 3; ++round) {
    const SequenceId id = Ask({1, 2, 3, 4}, 7);
    EXPECT_THAT(Step(), ElementsAre(Pair(id, round == 0 ? 4 : 2)));
    RunToTheEnd();
    EXPECT_EQ(scheduler_->Find(id), nullptr);
  }
}

TEST_F(SchedulerPrefixCacheTest, APreemptedSequenceFindsWhatItHadComputed) {
  SchedulerConfig config = CacheConfig();
  config.num_blocks = 8;  // 7 usable = 14 tokens for two of 12 at most
  Start(config);
  const SequenceId a = Ask({1, 1, 1, 1}, 9), b = Ask({2, 2, 2, 2}, 9);
  while (scheduler_->num_preempted() == 0) ASSERT_FALSE(Step().empty());
  ASSERT_EQ(scheduler_->Find(b)->state, SequenceState::kPreempted);
  while (scheduler_->Find(a) != nullptr) Step();
  const int known = scheduler_->Find(b)->num_tokens();
  const auto plan = Step();
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_LT(plan[0].second, known);
  EXPECT_EQ(scheduler_->counters().tokens_recomputed, scheduler_->Find(b)->num_recomputed);
  EXPECT_LT(scheduler_->counters().tokens_recomputed, known - 1);
  EXPECT_EQ(scheduler_->Find(b)->num_cached_prompt_tokens, 0);  // at its first admission
  RunToTheEnd();
}

TEST_F(SchedulerPrefixCacheTest, PausedOnesThatShareTheirBlocksMakeRoomTogether) {
  SchedulerConfig config = CacheConfig();
  config.num_blocks = 7;  // 6 usable
  Start(config);
  const SequenceId a = Ask({1, 2, 3, 4, 5}, 4), b = Ask({1, 2, 3, 4, 6}, 4);
  Step();
  Step();
  ASSERT_EQ(scheduler_->blocks_used(), 4);  // neither of them has more than one for itself
  scheduler_->SetPaused(a, true);
  scheduler_->SetPaused(b, true);
  const SequenceId whole_pool = Ask(std::vector<int32_t>(12, 9));
  EXPECT_THAT(Step(), ElementsAre(Pair(whole_pool, 12)));
  scheduler_->SetPaused(a, false);
  scheduler_->SetPaused(b, false);
  RunToTheEnd();
  EXPECT_EQ(scheduler_->Find(a), nullptr);
  EXPECT_EQ(scheduler_->Find(b), nullptr);
}

TEST_F(SchedulerPrefixCacheTest, ClearingMakesTheNextPromptComputeAll) {
  Start(CacheConfig());
  const SequenceId running = Ask({1, 2, 3, 4, 5}, 9);
  Step();
  scheduler_->ClearPrefixCache();
  const SequenceId next = Ask({1, 2, 3, 4, 5}, 1);
  EXPECT_THAT(Step(), ElementsAre(Pair(running, 1), Pair(next, 5)));
  EXPECT_EQ(scheduler_->blocks_unaccounted(), 0);
}

}  // namespace
}  // namespace flashquant
