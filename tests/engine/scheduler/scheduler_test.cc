// Each scheduling rule by itself, in plans small enough to check by hand.
#include "engine/scheduler/scheduler.h"

#include <chrono>
#include <map>
#include <memory>
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

TEST_F(SchedulerTest, APromptIsCutIntoChunksOfTheBudget) {
  Start(Config());
  const SequenceId id = Add(20, 3);
  EXPECT_THAT(Schedule(), ElementsAre(Pair(id, 8)));
  EXPECT_EQ(plan_.phase, StepPhase::kPrefill);
  EXPECT_FALSE(plan_.sequences[0].samples);
  EXPECT_THAT(Commit().tokens, IsEmpty());
  EXPECT_THAT(Step(), ElementsAre(Pair(id, 8)));
  EXPECT_THAT(Schedule(), ElementsAre(Pair(id, 4)));
  EXPECT_TRUE(plan_.sequences[0].samples);
  EXPECT_EQ(plan_.sequences[0].first_position, 16);
  EXPECT_EQ(Commit().tokens.size(), 1u);
  EXPECT_THAT(Schedule(), ElementsAre(Pair(id, 1)));
  EXPECT_EQ(plan_.phase, StepPhase::kDecode);
  EXPECT_EQ(plan_.sequences[0].output_position, 1);
}

TEST_F(SchedulerTest, DecodesComeFirstAndChunksTakeWhatIsLeft) {
  Start(Config());
  const SequenceId decoding = Add(2, 10);
  Step();
  const SequenceId prompt = Add(30, 3);
  EXPECT_THAT(Step(), ElementsAre(Pair(decoding, 1), Pair(prompt, 7)));
  EXPECT_THAT(Step(), ElementsAre(Pair(decoding, 1), Pair(prompt, 7)));
}

TEST_F(SchedulerTest, AChunkLeavesHalfOfTheBudgetToOneThatIsDoneWithIt) {
  Start(Config());
  const SequenceId longer = Add(30, 3);
  const SequenceId shorter = Add(3, 3);
  // Half for the long one, three for the short one, and the remaining one goes back.
  EXPECT_THAT(Step(), ElementsAre(Pair(longer, 5), Pair(shorter, 3)));
  EXPECT_THAT(Step(), ElementsAre(Pair(shorter, 1), Pair(longer, 7)));
}

TEST_F(SchedulerTest, AChunkIsNotCutForOneThatWouldNotBeDone) {
  Start(Config());
  const SequenceId first = Add(8, 3);
  const SequenceId second = Add(5, 3);  // more than the other half
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 8)));
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 1), Pair(second, 5)));
}

TEST_F(SchedulerTest, AdmissionIsFirstComeFirstServed) {
  SchedulerConfig config = Config();
  config.num_blocks = 8;  // 7 usable
  Start(config);
  const SequenceId first = Add(8, 5);   // 4 blocks now, 6 at most
  const SequenceId second = Add(8, 5);  // does not fit beside it
  const SequenceId third = Add(1, 1);   // would fit, but stands behind
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 8)));
  for (int i = 0; i < 4; ++i) EXPECT_THAT(Step(), ElementsAre(Pair(first, 1)));
  EXPECT_THAT(Schedule(), ElementsAre(Pair(second, 7), Pair(third, 1)));
  EXPECT_THAT(scheduler_->admitted(), ElementsAre(second, third));
}

TEST_F(SchedulerTest, NeverMoreThanMaxSequencesRun) {
  Start(Config());
  for (int i = 0; i < 6; ++i) Add(1, 3);
  EXPECT_EQ(Schedule().size(), 4u);
  EXPECT_EQ(scheduler_->num_waiting(), 2);
}

// R14
TEST_F(SchedulerTest, ARequestOfExactlyThePoolsSizeRunsAlone) {
  SchedulerConfig config = Config();
  config.num_blocks = 6;  // 5 usable = 10 tokens
  Start(config);
  EXPECT_EQ(Scheduler::BlocksNeeded(4, 7, 2), 5);
  const SequenceId whole_pool = Add(4, 7);
  const SequenceId behind = Add(1, 1);
  EXPECT_THAT(Step(), ElementsAre(Pair(whole_pool, 4), Pair(behind, 1)));
  for (int i = 0; i < 6; ++i) EXPECT_THAT(Step(), ElementsAre(Pair(whole_pool, 1)));
  EXPECT_EQ(scheduler_->blocks_used(), 0);
}

// T15
TEST_F(SchedulerTest, RowsArePaddedToTheBackendsMultiple) {
  SchedulerConfig config = Config();
  config.row_multiple = 8;
  config.token_budget = 20;
  Start(config);
  Add(9, 3);
  Schedule();
  EXPECT_EQ(plan_.num_tokens, 9);
  EXPECT_EQ(plan_.num_rows, 16);
  Commit();
  Schedule();
  EXPECT_EQ(plan_.num_tokens, 1);
  EXPECT_EQ(plan_.num_rows, 8);
}

TEST_F(SchedulerTest, TheYoungestIsPreemptedAndTheOldestNever) {
  SchedulerConfig config = Config();
  config.num_blocks = 8;  // 7 usable = 14 tokens for three of 6 tokens at most
  Start(config);
  const SequenceId a = Add(2, 5), b = Add(2, 5), c = Add(2, 5);
  Step();
  ASSERT_EQ(scheduler_->num_running(), 3);
  Step();  // each has two blocks
  Step();
  EXPECT_THAT(Step(), ElementsAre(Pair(a, 1), Pair(b, 1)));  // the third block of a cost c its two
  EXPECT_EQ(scheduler_->Find(c)->state, SequenceState::kPreempted);
  EXPECT_EQ(BlocksOf(c), 0);
  EXPECT_EQ(scheduler_->Find(c)->num_computed_tokens, 0);
  EXPECT_EQ(scheduler_->Find(c)->num_output_tokens(), 3);  // tokens stay
  EXPECT_EQ(scheduler_->counters().preemptions_for_blocks, 1);
  // Recomputes prompt and answer in one chunk.
  EXPECT_THAT(Step(), ElementsAre(Pair(a, 1), Pair(b, 1)));
  EXPECT_THAT(Step(), ElementsAre(Pair(c, 5)));
  EXPECT_EQ(scheduler_->counters().tokens_recomputed, 4);
}

TEST_F(SchedulerTest, PreemptedSequencesComeBackBeforeWaitingOnes) {
  SchedulerConfig config = Config();
  config.num_blocks = 8;
  Start(config);
  const SequenceId a = Add(2, 5), b = Add(2, 5), c = Add(2, 5);
  for (int i = 0; i < 4; ++i) Step();
  ASSERT_EQ(scheduler_->num_preempted(), 1);
  const SequenceId late = Add(1, 2);
  EXPECT_THAT(Step(), ElementsAre(Pair(a, 1), Pair(b, 1)));
  EXPECT_THAT(Step(), ElementsAre(Pair(c, 5), Pair(late, 1)));
}

TEST_F(SchedulerTest, ASequenceWithoutYoungerVictimsSitsOut) {
  SchedulerConfig config = Config();
  config.num_blocks = 6;  // 5 usable
  Start(config);
  const SequenceId older = Add(2, 8), younger = Add(2, 8);
  Step();
  Step();
  Step();
  // older takes the fifth block; younger needs one as well and waits for it, keeping its two.
  EXPECT_THAT(Step(), ElementsAre(Pair(older, 1)));
  EXPECT_EQ(scheduler_->Find(younger)->state, SequenceState::kRunning);
  EXPECT_EQ(BlocksOf(younger), 2);
}

// S3
TEST_F(SchedulerTest, AfterEightPreemptionsASequenceRunsToItsEnd) {
  SchedulerConfig config = Config();
  config.num_blocks = 8;  // 7 usable
  Start(config);
  const SequenceId victim = 1000;
  next_id_ = 0;
  scheduler_->Add(victim, {.prompt_tokens = {1, 2}, .max_output_tokens = 12});  // 7 blocks at most
  Step();
  // A paused sequence is the first victim: pause it and let others need its blocks.
  int rounds = 0;
  SequenceId id = victim + 1;
  while (scheduler_->Find(victim) != nullptr &&
         scheduler_->Find(victim)->num_preemptions < Scheduler::kMaxPreemptions) {
    scheduler_->SetPaused(victim, true);
    // The whole pool.
    scheduler_->Add(id, {.prompt_tokens = std::vector<int32_t>(14, 3), .max_output_tokens = 1});
    while (scheduler_->Find(id) != nullptr) Step();
    ++id;
    scheduler_->SetPaused(victim, false);
    Step();
    ASSERT_LT(++rounds, 20);
  }
  ASSERT_EQ(scheduler_->Find(victim)->num_preemptions, Scheduler::kMaxPreemptions);
  EXPECT_EQ(BlocksOf(victim), 7);  // all that it can ever need
  scheduler_->SetPaused(victim, true);
  scheduler_->Add(id, {.prompt_tokens = {1}, .max_output_tokens = 1});
  EXPECT_THAT(Schedule(), IsEmpty());  // paused, yet not a victim any more
  scheduler_->SetPaused(victim, false);
  int steps = 0;
  while (scheduler_->Find(victim) != nullptr) {
    Step();
    ASSERT_LT(++steps, 20);
  }
}

TEST_F(SchedulerTest, APausedSequenceIsNotScheduledAndKeepsItsBlocks) {
  Start(Config());
  const SequenceId a = Add(2, 9), b = Add(2, 9);
  Step();
  scheduler_->SetPaused(a, true);
  EXPECT_EQ(scheduler_->num_paused(), 1);
  EXPECT_THAT(Step(), ElementsAre(Pair(b, 1)));
  EXPECT_EQ(BlocksOf(a), 1);
  scheduler_->SetPaused(a, false);
  EXPECT_THAT(Step(), ElementsAre(Pair(a, 1), Pair(b, 1)));
}

TEST_F(SchedulerTest, APausedSequenceGivesItsBlocksToAnyOther) {
  SchedulerConfig config = Config();
  config.num_blocks = 6;  // 5 usable
  Start(config);
  const SequenceId paused = Add(4, 6), other = Add(4, 6);
  Step();
  scheduler_->SetPaused(paused, true);
  for (int i = 0; i < 3; ++i) EXPECT_THAT(Step(), ElementsAre(Pair(other, 1)));
  EXPECT_EQ(scheduler_->Find(paused)->state, SequenceState::kPreempted);
  // While paused it does not stand in the way of those behind it either.
  const SequenceId late = Add(1, 1);
  for (int i = 0; i < 2; ++i) EXPECT_THAT(Step(), ElementsAre(Pair(other, 1)));
  EXPECT_THAT(Step(), ElementsAre(Pair(late, 1)));
}

// S4
TEST_F(SchedulerTest, ReleaseGivesBackTheBlocksFromEveryState) {
  SchedulerConfig config = Config();
  config.num_blocks = 8;
  Start(config);
  const SequenceId a = Add(2, 5), b = Add(2, 5), c = Add(2, 5);
  for (int i = 0; i < 4; ++i) Step();
  const SequenceId waiting = Add(6, 2);
  ASSERT_EQ(scheduler_->Find(c)->state, SequenceState::kPreempted);
  scheduler_->SetPaused(b, true);
  for (SequenceId id : {waiting, c, b, a}) {
    EXPECT_TRUE(scheduler_->Release(id, ReleaseReason::kCancelled));
    EXPECT_EQ(scheduler_->Find(id), nullptr);
    EXPECT_EQ(scheduler_->blocks_unaccounted(), 0);
    EXPECT_FALSE(scheduler_->Release(id, ReleaseReason::kCancelled));  // twice is harmless
  }
  EXPECT_EQ(scheduler_->blocks_used(), 0);
  EXPECT_THAT(Schedule(), IsEmpty());
}

// S4
TEST_F(SchedulerTest, ReleaseInTheMiddleOfAPromptGivesBackTheBlocks) {
  Start(Config());
  const SequenceId id = Add(20, 3);
  Step();
  EXPECT_TRUE(scheduler_->Release(id, ReleaseReason::kCancelled));
  EXPECT_EQ(scheduler_->blocks_used(), 0);
}

TEST_F(SchedulerTest, EndTokensAreBannedBeforeTheLeastNumberOfTokens) {
  Start(Config());
  StopConditions stop;
  stop.min_output_tokens = 3;
  Add(2, 9, stop);
  for (bool banned : {true, true, false, false}) {
    Schedule();
    EXPECT_EQ(plan_.sequences[0].end_tokens_banned, banned);
    Commit();
  }
}

TEST_F(SchedulerTest, ANonFiniteRowReleasesItsSequenceOnly) {
  Start(Config());
  const SequenceId bad = Add(2, 5), good = Add(2, 5);
  runner_->SetNonFinite([&](const SequenceStep& step) { return step.id == bad; });
  Schedule();
  const CommitResult committed = Commit();
  ASSERT_EQ(committed.tokens.size(), 2u);
  EXPECT_TRUE(committed.tokens[0].non_finite);
  EXPECT_FALSE(committed.tokens[1].non_finite);
  EXPECT_EQ(scheduler_->Find(bad), nullptr);
  EXPECT_EQ(scheduler_->blocks_used(), BlocksOf(good));
}

// S14
TEST_F(SchedulerTest, IdsAndTimesBeyond32BitsAreNothingSpecial) {
  SchedulerConfig config = Config();
  config.num_blocks = 8;
  Start(config);
  next_id_ = (int64_t{1} << 40) - 1;
  const auto late = TimePoint(std::chrono::hours(200 * 365 * 24));
  const SequenceId first = Add({.prompt_tokens = {1, 2}, .max_output_tokens = 5, .arrival = late});
  const SequenceId second =
      Add({.prompt_tokens = {3, 4}, .max_output_tokens = 5, .priority = -10, .arrival = late});
  const FakeModel model;
  std::map<SequenceId, std::vector<int32_t>> answers;
  while (!Schedule().empty()) {
    for (const CommittedToken& token : Commit().tokens) answers[token.id].push_back(token.token_id);
  }
  EXPECT_EQ(answers.at(first), model.Answer({1, 2}, 0, 5));
  EXPECT_EQ(answers.at(second), model.Answer({3, 4}, 0, 5));
}

TEST_F(SchedulerTest, CommitRefusesAResultThatDoesNotAnswerThePlan) {
  Start(Config());
  const SequenceId id = Add(2, 5);
  Schedule();
  StepResult result;
  EXPECT_THAT(scheduler_->Commit(result),
              StatusIs(absl::StatusCode::kInternal, testing::HasSubstr("0 tokens for 1")));
  result.tokens.push_back({.id = id + 1, .token_id = 3, .non_finite = false});
  EXPECT_THAT(scheduler_->Commit(result),
              StatusIs(absl::StatusCode::kInternal, testing::HasSubstr("row 0")));
  result.tokens[0].id = id;
  FQ_EXPECT_OK(scheduler_->Commit(result));
}

}  // namespace
}  // namespace flashquant
