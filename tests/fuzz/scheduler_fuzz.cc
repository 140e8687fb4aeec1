// Scheduler and KV block allocator (target F10). Input: bytes of a configuration, then operations,
// one byte each with bytes of arguments: arrivals, plans, commits, releases, pauses.
//
// Properties, after each operation: every block is accounted for and no plan writes a block of
// another sequence (the pretended model sees to it); a second release does nothing; each answer is
// that of its sequence alone; at the end all that is left comes to its end, and the pool is whole.
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/scheduler/scheduler.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/support/fake_step_runner.h"
#include "tests/support/paused_sequences.h"

namespace flashquant {
namespace {

constexpr int kMaxOperations = 400;
constexpr uint64_t kNonFiniteSeed = 3;

SchedulerConfig Config(FuzzInput* input) {
  SchedulerConfig config;
  config.max_sequences = input->Number(1, 8);
  config.token_budget = input->Number(1, 24);
  config.block_tokens = input->Number(1, 4);
  config.num_blocks = input->Number(2, 32);
  config.row_multiple = input->Chance(2) ? 1 : 8;
  config.prefix_cache = input->Chance(2);
  return config;
}

class Run {
 public:
  explicit Run(FuzzInput input)
      : input_(input),
        config_(Config(&input_)),
        scheduler_(config_),
        runner_(config_.num_blocks, config_.block_tokens) {
    runner_.SetNonFinite([](const SequenceStep& step) {
      return step.sampling->seed == kNonFiniteSeed && step.output_position == 1;
    });
  }

  void All() {
    for (int i = 0; i < kMaxOperations && !input_.empty(); ++i) {
      Operation();
      CheckInvariants();
    }
    paused_.ResumeAll();
    for (int step = 0; !live_.empty(); ++step) {
      Require(step < 20'000, "no progress");
      while (scheduler_.num_uncommitted() > 0) Commit();
      Plan();
      CheckInvariants();
    }
    while (scheduler_.num_uncommitted() > 0) Commit();
    Require(scheduler_.blocks_used() == 0, "blocks are left");
    scheduler_.ClearPrefixCache();
    Require(scheduler_.blocks_cached() == 0, "cached blocks are left");
    CheckInvariants();
  }

 private:
  struct Expected {
    std::vector<int32_t> answer;
    size_t num_got = 0;
  };

  void Operation() {
    switch (input_.Number(0, 9)) {
      case 0:
      case 1:
        return Arrive();
      case 2:
      case 3:
      case 4:
        if (scheduler_.num_uncommitted() < 2) Plan();
        return;
      case 5:
      case 6:
        if (scheduler_.num_uncommitted() > 0) Commit();
        return;
      case 7:
        return ReleaseOne();
      case 8:
        return TogglePause();
      default:
        return scheduler_.ClearPrefixCache();
    }
  }

  void Arrive() {
    const int32_t pool = scheduler_.usable_blocks() * config_.block_tokens;
    SequenceRequest request;
    const int32_t prompt = input_.Number(1, pool);
    // Few different tokens: prompts begin alike.
    const int32_t token = input_.Number(0, 1);
    for (int32_t i = 0; i < prompt; ++i) request.prompt_tokens.push_back(token);
    if (input_.Chance(2)) request.prompt_tokens.back() = 7;
    request.max_output_tokens = input_.Number(1, pool + 1 - prompt);
    request.sampling.seed = static_cast<uint64_t>(input_.Number(0, 3));
    if (input_.Chance(4)) request.sampling.presence_penalty = 1.0f;
    request.priority = input_.Number(-2, 2);
    request.cache_salt = input_.Chance(4) ? "other" : "";
    now_ += std::chrono::milliseconds(input_.Number(0, 255) * 20);
    request.arrival = now_;
    request.patience_per_token = std::chrono::milliseconds(input_.Number(0, 255));
    const SequenceId id = next_id_++;
    live_[id].answer =
        model_.Answer(request.prompt_tokens, request.sampling.seed, request.max_output_tokens);
    scheduler_.Add(id, std::move(request));
  }
  void Plan() {
    const StepPlan& plan = scheduler_.Schedule();
    if (plan.empty()) return;
    Require(plan.num_tokens <= config_.token_budget, "more tokens than the budget");
    Require(static_cast<int32_t>(plan.sequences.size()) <= config_.max_sequences, "sequences");
    for (const SequenceStep& step : plan.sequences) {
      Require(live_.contains(step.id) && !paused_.contains(step.id), "a plan for nobody");
    }
    Require(runner_.Launch(plan).ok(), "launch");
    Require(runner_.violation().empty(), runner_.violation());
  }
  void Commit() {
    const auto committed = scheduler_.Commit(*runner_.Collect());
    Require(committed.ok(), "commit");
    for (const CommittedToken& token : committed->tokens) {
      Require(live_.contains(token.id), "a token for nobody");
      Expected& expected = live_[token.id];
      if (token.non_finite) {
        Gone(token.id);
        continue;
      }
      Require(expected.num_got < expected.answer.size() &&
                  token.token_id == expected.answer[expected.num_got],
              "another answer than alone");
      if (++expected.num_got == expected.answer.size()) Release(token.id);
    }
    for (const DiscardedToken& token : committed->discarded) {
      Require(!live_.contains(token.id), "a living sequence's token is discarded");
    }
  }
  void Release(SequenceId id) {
    scheduler_.Release(id, ReleaseReason::kFinished);
    Require(!scheduler_.Release(id, ReleaseReason::kCancelled), "released twice");
    Gone(id);
  }
  void Gone(SequenceId id) {
    live_.erase(id);
    paused_.Forget(id);
  }
  SequenceId AnyLive() {
    auto chosen = live_.begin();
    std::advance(chosen, input_.Number(0, static_cast<int32_t>(live_.size()) - 1));
    return chosen->first;
  }
  void ReleaseOne() {
    if (!live_.empty()) Release(AnyLive());
  }
  void TogglePause() {
    if (!live_.empty()) paused_.Toggle(AnyLive());
  }
  void CheckInvariants() {
    Require(scheduler_.blocks_unaccounted() == 0, "unaccounted blocks");
    Require(scheduler_.blocks_used() + scheduler_.blocks_cached() <= scheduler_.usable_blocks(),
            "more blocks than there are");
    Require(scheduler_.num_waiting() + scheduler_.num_running() + scheduler_.num_preempted() ==
                static_cast<int>(live_.size()),
            "a sequence in no set, or in two");
    for (const auto& [id, expected] : live_) {
      const Sequence* sequence = scheduler_.Find(id);
      Require(sequence != nullptr, "a living sequence is lost");
      Require(sequence->num_preemptions <= Scheduler::kMaxPreemptions, "preempted too often");
    }
  }

  FuzzInput input_;
  const SchedulerConfig config_;
  const FakeModel model_;
  Scheduler scheduler_;
  FakeStepRunner runner_;
  std::map<SequenceId, Expected> live_;
  PausedSequences paused_{&scheduler_};
  SequenceId next_id_ = 0;
  TimePoint now_{};
};

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashquant::Run({data, size}).All();
  return 0;
}
