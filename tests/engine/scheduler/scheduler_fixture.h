// SchedulerTest: the scheduler with the pretended model behind it, driven step by step.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/scheduler/scheduler.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_step_runner.h"
#include "tests/support/status_matchers.h"

namespace flashquant {

// Sequences end by length.
class SchedulerTest : public testing::Test {
 protected:
  void Start(SchedulerConfig config) {
    scheduler_ = std::make_unique<Scheduler>(config);
    runner_ = std::make_unique<FakeStepRunner>(config.num_blocks, config.block_tokens);
  }
  static SchedulerConfig Config() {
    SchedulerConfig config;
    config.max_sequences = 4;
    config.token_budget = 8;
    config.block_tokens = 2;
    config.num_blocks = 41;
    return config;
  }

  SequenceId Add(int prompt_tokens, int max_output_tokens, StopConditions stop = {}) {
    const SequenceId id = next_id_++;
    scheduler_->Add(id,
                    {.prompt_tokens = std::vector<int32_t>(static_cast<size_t>(prompt_tokens), 5),
                     .stop = std::move(stop),
                     .max_output_tokens = max_output_tokens});
    return id;
  }
  SequenceId Add(SequenceRequest request) {
    const SequenceId id = next_id_++;
    scheduler_->Add(id, std::move(request));
    return id;
  }
  // Schedules and launches: (sequence, tokens) in the plan's order.
  std::vector<std::pair<SequenceId, int>> Schedule() {
    const StepPlan& plan = scheduler_->Schedule();
    std::vector<std::pair<SequenceId, int>> result;
    for (const SequenceStep& step : plan.sequences) {
      result.emplace_back(step.id, static_cast<int>(step.token_ids.size()));
    }
    plan_ = plan;
    if (!plan.empty()) {
      FQ_EXPECT_OK(runner_->Launch(plan));
    }
    return result;
  }
  // Collects the oldest step, and ends the sequences that have all their tokens.
  CommitResult Commit() {
    auto committed = scheduler_->Commit(*runner_->Collect());
    FQ_EXPECT_OK(committed);
    for (const CommittedToken& token : committed->tokens) {
      const Sequence* sequence = scheduler_->Find(token.id);
      if (sequence == nullptr) continue;
      if (token.output_index + 1 == sequence->max_tokens - sequence->num_prompt_tokens) {
        scheduler_->Release(token.id, ReleaseReason::kFinished);
      }
    }
    EXPECT_EQ(scheduler_->blocks_unaccounted(), 0);
    EXPECT_EQ(runner_->violation(), "");
    return *std::move(committed);
  }
  std::vector<std::pair<SequenceId, int>> Step() {
    auto plan = Schedule();
    if (!plan.empty()) Commit();
    return plan;
  }
  int BlocksOf(SequenceId id) { return scheduler_->Find(id)->blocks.num_blocks(); }

  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<FakeStepRunner> runner_;
  StepPlan plan_;  // of the last Schedule; its spans are stale after the next call
  SequenceId next_id_ = 0;
};

}  // namespace flashquant
