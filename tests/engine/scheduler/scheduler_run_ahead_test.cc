// Scheduling a step while the one before is uncollected.
#include <memory>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/scheduler/scheduler_fixture.h"

namespace flashquant {
namespace {

using SchedulerRunAheadTest = SchedulerTest;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;

TEST_F(SchedulerRunAheadTest, RunAheadRefersToTheRowThatIsStillInFlight) {
  Start(Config());
  const SequenceId a = Add(2, 5), b = Add(2, 5);
  Schedule();
  const SequenceId prompt = Add(20, 5);
  EXPECT_THAT(Schedule(), ElementsAre(Pair(a, 1), Pair(b, 1), Pair(prompt, 6)));
  EXPECT_EQ(plan_.sequences[0].previous_row, 0);
  EXPECT_EQ(plan_.sequences[1].previous_row, 1);
  EXPECT_EQ(plan_.sequences[2].previous_row, -1);
  EXPECT_EQ(scheduler_->num_uncommitted(), 2);
  const CommitResult first = Commit();
  ASSERT_EQ(first.tokens.size(), 2u);
  EXPECT_EQ(first.tokens[0].output_index, 0);
  const CommitResult second = Commit();
  EXPECT_EQ(second.tokens[0].output_index, 1);
  const FakeModel model;
  EXPECT_EQ(second.tokens[0].token_id, model.Answer({5, 5}, 0, 2)[1]);
}

TEST_F(SchedulerRunAheadTest, RunAheadNeverGoesPastTheLimit) {
  Start(Config());
  const SequenceId id = Add(2, 2);
  EXPECT_THAT(Schedule(), ElementsAre(Pair(id, 2)));
  EXPECT_THAT(Schedule(), ElementsAre(Pair(id, 1)));
  Commit();
  EXPECT_THAT(Schedule(), IsEmpty());
  EXPECT_THAT(Commit().discarded, IsEmpty());
  EXPECT_EQ(scheduler_->blocks_used(), 0);
}

TEST_F(SchedulerRunAheadTest, AStopSeenOneStepLateDiscardsTheExtraTokenAndHoldsTheBlocksUntilThen) {
  Start(Config());
  const SequenceId id = Add(4, 9);
  Schedule();
  Schedule();
  Commit();
  EXPECT_FALSE(scheduler_->Release(id, ReleaseReason::kFinished));
  EXPECT_EQ(scheduler_->blocks_used(), 3);  // the step in flight may still write them
  EXPECT_EQ(scheduler_->blocks_unaccounted(), 0);
  const CommitResult late = Commit();
  EXPECT_THAT(late.tokens, IsEmpty());
  ASSERT_EQ(late.discarded.size(), 1u);
  EXPECT_EQ(late.discarded[0].reason, ReleaseReason::kFinished);
  EXPECT_THAT(late.blocks_returned, ElementsAre(id));
  EXPECT_EQ(scheduler_->blocks_used(), 0);
}

TEST_F(SchedulerRunAheadTest, ASequenceWithPenaltiesWaitsForItsLastToken) {
  Start(Config());
  SamplingParams penalty;
  penalty.frequency_penalty = 0.5f;
  const SequenceId plain = Add(2, 5), counted = next_id_++;
  scheduler_->Add(counted, {.prompt_tokens = {5, 5}, .sampling = penalty, .max_output_tokens = 5});
  EXPECT_THAT(Schedule(), ElementsAre(Pair(plain, 2), Pair(counted, 2)));
  EXPECT_THAT(plan_.sequences[1].token_counts, IsEmpty());
  EXPECT_THAT(Schedule(), ElementsAre(Pair(plain, 1)));
  const CommitResult first = Commit();
  EXPECT_THAT(Schedule(), ElementsAre(Pair(plain, 1), Pair(counted, 1)));
  EXPECT_EQ(plan_.sequences[1].previous_row, -1);
  ASSERT_EQ(plan_.sequences[1].token_counts.size(), 1u);
  EXPECT_EQ(plan_.sequences[1].token_counts[0].token_id, first.tokens[1].token_id);
  EXPECT_EQ(plan_.sequences[1].token_counts[0].num_outputs, 1);
  Commit();
  Commit();
}

TEST_F(SchedulerRunAheadTest, BlocksOfAPreemptedSequenceAreNotReusedWhileItsStepIsInFlight) {
  SchedulerConfig config = Config();
  config.num_blocks = 7;  // 6 usable
  Start(config);
  const SequenceId a = Add(4, 5), b = Add(3, 5);  // 2 blocks each, 4 at most
  Step();
  EXPECT_THAT(Schedule(), ElementsAre(Pair(a, 1), Pair(b, 1)));  // a takes the fifth block
  EXPECT_THAT(Schedule(), ElementsAre(Pair(a, 1), Pair(b, 1)));  // b takes the sixth
  Commit();
  // a needs another one. b gives up its three, but the step in flight still writes them.
  EXPECT_THAT(Schedule(), IsEmpty());
  EXPECT_EQ(scheduler_->Find(b)->state, SequenceState::kPreempted);
  EXPECT_EQ(scheduler_->blocks_used(), 6);
  // What that step drew for b is still good.
  EXPECT_EQ(Commit().tokens.size(), 2u);
  EXPECT_EQ(scheduler_->blocks_used(), 3);
  EXPECT_THAT(Step(), ElementsAre(Pair(a, 1)));
  EXPECT_EQ(scheduler_->Find(b)->num_output_tokens(), 3);
}

}  // namespace
}  // namespace flashquant
