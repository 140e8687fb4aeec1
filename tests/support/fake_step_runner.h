// FakeStepRunner: a model without weights. The token it draws is a hash of all tokens of the
// sequence so far, read back through a pretended KV cache: a wrong block, a stale slot, a wrong
// position or a token that was not computed gives another answer than the sequence alone would, and
// so does a shared block that was written behind other tokens than the reader's.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/step_runner.h"
#include "kernels/base/mutex.h"

namespace flashquant {

struct FakeModel {
  int32_t vocab_size = 1000;
  // The token that follows `tokens` for this seed.
  int32_t NextToken(std::span<const int32_t> tokens, uint64_t seed) const;
  // What a request for `max_output_tokens` gets when it runs alone and nothing ends it before.
  std::vector<int32_t> Answer(std::vector<int32_t> prompt, uint64_t seed,
                              int max_output_tokens) const;
  // What comes with the token when logprobs are asked for.
  static OutputLogprobs Logprobs(int32_t token_id, int32_t num_top);
};

// Engine thread; the setters before the engine starts, the gate from any thread.
class FakeStepRunner final : public StepRunner {
 public:
  FakeStepRunner(int32_t num_blocks, int32_t block_tokens, FakeModel model = {});

  absl::Status Launch(const StepPlan& plan) override;
  absl::StatusOr<StepResult> Collect() override;

  // The n-th call (from 1) fails with INTERNAL.
  void FailLaunch(int n) { fail_launch_ = n; }
  void FailCollect(int n) { fail_collect_ = n; }
  // The n-th Launch throws.
  void ThrowInLaunch(int n) { throw_in_launch_ = n; }
  // Rows for which this is true are reported as not finite.
  void SetNonFinite(std::function<bool(const SequenceStep&)> non_finite) {
    non_finite_ = std::move(non_finite);
  }
  // Called at the start of each Launch.
  void OnLaunch(std::function<void(const StepPlan&)> hook) { on_launch_ = std::move(hook); }
  // Closed: Collect waits until the gate is opened again.
  void CloseGate();
  void OpenGate();
  // Waits until Collect stands before the closed gate.
  void WaitUntilAtGate();

  int num_launched() const { return num_launched_; }
  // What was wrong with the plans; empty = nothing.
  const std::string& violation() const { return violation_; }

 private:
  // The counts in the plan are those of the tokens read back, `context`.
  void CheckCounts(const SequenceStep& step, std::span<const int32_t> context);
  void Violate(std::string text);
  // Blocks that a step has in its tables: by whom each is read, and by whom written.
  struct BlockUse {
    std::map<int32_t, std::set<SequenceId>> readers;  // writers included
    std::map<int32_t, SequenceId> writers;
  };
  BlockUse CheckBlocks(const StepPlan& plan);
  int32_t SlotOf(const SequenceStep& step, int32_t position) const;
  void WriteSlots(const SequenceStep& step);
  // The tokens up to the step's last one, from the slots.
  std::vector<int32_t> ReadContext(const SequenceStep& step);

  const int32_t num_blocks_;
  const int32_t block_tokens_;
  const FakeModel model_;
  // What a KV slot holds depends on its token and on all tokens before it.
  struct Slot {
    int32_t token = -1;
    uint64_t context = 0;  // hash of the tokens up to it
  };
  std::vector<Slot> slots_;
  struct InFlight {
    StepResult result;
    BlockUse blocks;
  };
  std::deque<InFlight> in_flight_;
  std::vector<int32_t> previous_tokens_;  // sampled by the last launched step
  int num_launched_ = 0;
  int num_collected_ = 0;
  int fail_launch_ = 0;
  int fail_collect_ = 0;
  int throw_in_launch_ = 0;
  std::function<bool(const SequenceStep&)> non_finite_;
  std::function<void(const StepPlan&)> on_launch_;
  std::string violation_;

  Mutex mu_;
  CondVar gate_changed_;
  bool gate_closed_ ABSL_GUARDED_BY(mu_) = false;
  bool at_gate_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace flashquant
