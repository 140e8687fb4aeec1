// The scheduler against the pretended model under more than a million random operations: arrivals
// of several priorities, patiences, salts and beginnings, cancels, pauses, rows not finite, a
// cleared cache, a small pool, with and without run-ahead and uniform steps. The invariants of
// engine/README.md are checked after each; each answer must be the one of the sequence alone.
#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/scheduler/scheduler.h"
#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/scheduler/prefill_reference.h"
#include "tests/engine/scheduler/scheduler_reference.h"
#include "tests/engine/scheduler/uniform_steps_reference.h"
#include "tests/support/fake_step_runner.h"
#include "tests/support/paused_sequences.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

struct Scenario {
  int32_t usable_blocks;
  int32_t block_tokens;
  int32_t token_budget;
  int32_t max_sequences;
  int32_t row_multiple;
  bool run_ahead;
  int cancel_percent;
  int pause_percent;
  uint32_t seed;
  bool prefix_cache = false;
  int num_priorities = 1;
  int non_finite_permille = 0;  // of the rows
  int clear_permille = 0;       // of the steps
  // Everything that is ever cached fits, so that each hit can be foretold.
  bool roomy = false;
  bool uniform_steps = false;
};

constexpr int64_t kAgeingMs = 50;
constexpr int64_t kStepMs = 10;

struct Expected {
  size_t num_prompt_tokens = 0;
  std::vector<int32_t> answer;
  std::vector<int32_t> got;
  std::optional<size_t> stop_after;  // tokens after which "a stop string" ends it
  int32_t next_position = 0;         // of its next step, if it is not admitted anew
};

class RandomRun {
 public:
  explicit RandomRun(const Scenario& scenario)
      : scenario_(scenario),
        random_(scenario.seed),
        config_(ToConfig(scenario)),
        scheduler_(config_),
        runner_(config_.num_blocks, config_.block_tokens),
        reference_(config_.block_tokens, kAgeingMs),
        uniform_(config_, &scheduler_),
        prefills_(config_, &scheduler_, &reference_) {
    runner_.SetNonFinite(
        [this](const SequenceStep&) { return Uniform(1, 1000) <= scenario_.non_finite_permille; });
  }

  void Run(int num_steps) {
    for (int step = 0; step < num_steps && !testing::Test::HasFailure(); ++step) {
      now_ms_ += kStepMs;
      if (Chance(30) && live_.size() < 20) Arrive();
      if (Chance(scenario_.cancel_percent)) CancelOne();
      if (Chance(scenario_.pause_percent)) TogglePause();
      if (Uniform(1, 1000) <= scenario_.clear_permille) ClearCache();
      OneStep();
    }
    paused_.ResumeAll();
    for (int step = 0; !live_.empty() && !testing::Test::HasFailure(); ++step) {
      OneStep();
      ASSERT_LT(step, 5000) << "no progress";
    }
    while (in_flight_ > 0) Commit();
    EXPECT_EQ(scheduler_.blocks_used(), 0);
    EXPECT_EQ(scheduler_.blocks_unaccounted(), 0);
    EXPECT_GT(num_finished_, 0);
    EXPECT_EQ(num_finished_ + num_cancelled_ + num_non_finite_, next_id_);  // each ended once
  }
  const Scheduler& scheduler() const { return scheduler_; }
  int64_t discarded() const { return num_discarded_; }
  int64_t non_finite() const { return num_non_finite_; }
  int64_t operations() const { return num_operations_; }

 private:
  static SchedulerConfig ToConfig(const Scenario& scenario) {
    SchedulerConfig config;
    config.max_sequences = scenario.max_sequences;
    config.token_budget = scenario.token_budget;
    config.block_tokens = scenario.block_tokens;
    config.num_blocks = scenario.usable_blocks + 1;
    config.row_multiple = scenario.row_multiple;
    config.prefix_cache = scenario.prefix_cache;
    config.uniform_steps = scenario.uniform_steps;
    config.priority_ageing = std::chrono::milliseconds(kAgeingMs);
    return config;
  }
  bool Chance(int percent) { return Uniform(1, 100) <= percent; }
  int Uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  // Of three texts, mostly with an end of its own.
  std::vector<int32_t> RandomPrompt(int num_tokens) {
    const int text = Uniform(0, 2);
    const int common = scenario_.roomy || Chance(30) ? num_tokens : Uniform(0, num_tokens);
    std::vector<int32_t> prompt;
    for (int i = 0; i < num_tokens; ++i) {
      prompt.push_back(i < common ? (text * 331 + i * 7) % 1000 : Uniform(0, 999));
    }
    return prompt;
  }
  void Arrive() {
    ++num_operations_;
    const int pool_tokens = scenario_.usable_blocks * scenario_.block_tokens;
    const int third = std::max(1, scenario_.roomy ? 30 : pool_tokens / 3);
    int prompt_tokens = Uniform(1, third);
    int max_output = Uniform(1, scenario_.roomy ? 6 : third);
    if (!scenario_.roomy && Chance(3)) {  // exactly the pool
      prompt_tokens = Uniform(1, pool_tokens);
      max_output = pool_tokens + 1 - prompt_tokens;
    }
    const std::vector<int32_t> prompt = RandomPrompt(prompt_tokens);
    SamplingParams sampling;
    sampling.seed = static_cast<uint64_t>(Uniform(0, scenario_.roomy ? 0 : 5));
    if (Chance(10)) sampling.presence_penalty = 0.5f;  // not run ahead
    Expected expected;
    expected.num_prompt_tokens = prompt.size();
    expected.answer = model_.Answer(prompt, sampling.seed, max_output);
    if (Chance(40)) expected.stop_after = static_cast<size_t>(Uniform(1, max_output));

    ReferenceRequest request{prompt,
                             prompt.size(),
                             std::string(static_cast<size_t>(Uniform(0, 2)), 's'),
                             Uniform(0, scenario_.num_priorities - 1) * 10 - 10,
                             now_ms_,
                             Chance(50) ? Uniform(1, 5000) : 0};
    const SequenceId id = next_id_++;
    scheduler_.Add(
        id, {.prompt_tokens = prompt,
             .sampling = sampling,
             .max_output_tokens = max_output,
             .priority = request.priority,
             .cache_salt = request.salt,
             .arrival = TimePoint(std::chrono::milliseconds(now_ms_)),
             .patience_per_token = std::chrono::microseconds(request.patience_us_per_token)});
    request.tokens.insert(request.tokens.end(), expected.answer.begin(), expected.answer.end());
    reference_.Add(id, std::move(request));
    const int32_t cached = scheduler_.Find(id)->num_cached_when_added;
    EXPECT_EQ(reference_.NoteCached(id, cached, scenario_.roomy), "");
    live_.emplace(id, std::move(expected));
  }
  SequenceId AnyLive() {
    auto chosen = live_.begin();
    std::advance(chosen, Uniform(0, static_cast<int>(live_.size()) - 1));
    return chosen->first;
  }
  void Forget(SequenceId id) {
    live_.erase(id);
    paused_.Forget(id);
    reference_.Remove(id);
  }
  void CancelOne() {
    if (live_.empty()) return;
    ++num_operations_;
    ++num_cancelled_;
    const SequenceId id = AnyLive();
    scheduler_.Release(id, ReleaseReason::kCancelled);
    Forget(id);
  }
  void TogglePause() {
    if (!live_.empty() && paused_.Toggle(AnyLive())) ++num_operations_;
  }
  void ClearCache() {
    ++num_operations_;
    scheduler_.ClearPrefixCache();
    reference_.Clear();
    EXPECT_EQ(scheduler_.blocks_cached(), 0);
    CheckInvariants();
  }

  void OneStep() {
    const bool launched = Launch();
    if (in_flight_ == 0) {
      // Nothing in flight and nothing planned: nobody unpaused may be left, unless paused ones that
      // cannot be preempted hold the pool.
      if (!launched && live_.size() > paused_.ids().size() && !ProtectedPausedExists()) {
        ADD_FAILURE() << "something waits, nothing runs, and no plan";
      }
      return;
    }
    if (scenario_.run_ahead && launched && in_flight_ == 1 && Chance(90)) return;
    Commit();
  }
  bool ProtectedPausedExists() {
    return std::ranges::any_of(paused_.ids(), [&](SequenceId id) {
      return scenario_.uniform_steps ||
             scheduler_.Find(id)->num_preemptions >= Scheduler::kMaxPreemptions;
    });
  }

  bool Launch() {
    std::optional<SequenceId> first;
    for (const auto& [id, expected] : live_) {
      const Sequence* sequence = scheduler_.Find(id);
      if (sequence->state != SequenceState::kRunning || paused_.contains(id)) continue;
      if (!first || reference_.Before(id, *first)) first = id;
    }
    ++num_operations_;
    uniform_.Look(live_);
    prefills_.Look(live_);
    const StepPlan& plan = scheduler_.Schedule();
    if (first) {
      EXPECT_EQ(scheduler_.Find(*first)->state, SequenceState::kRunning);
    }
    CheckAdmissions();
    CheckPlan(plan);
    EXPECT_EQ(scenario_.uniform_steps ? uniform_.Check(plan) : prefills_.Check(plan, live_), "");
    CheckInvariants();
    if (plan.empty()) return false;
    FQ_EXPECT_OK(runner_.Launch(plan));
    EXPECT_EQ(runner_.violation(), "");
    std::map<SequenceId, int32_t> ends;
    for (const SequenceStep& step : plan.sequences) {
      reference_.Write(step);
      const auto end = step.first_position + static_cast<int32_t>(step.token_ids.size());
      live_.at(step.id).next_position = end;
      if (step.samples) ends[step.id] = end;
    }
    launched_.push_back(std::move(ends));
    ++in_flight_;
    return true;
  }
  // Nobody is admitted past one that comes before it.
  void CheckAdmissions() {
    for (SequenceId id : scheduler_.admitted()) {
      for (const auto& [other, expected] : live_) {
        if (scheduler_.Find(other)->state != SequenceState::kWaiting) continue;
        EXPECT_TRUE(reference_.Before(id, other)) << id << " was admitted before " << other;
      }
    }
  }
  void CheckPlan(const StepPlan& plan) {
    int num_tokens = 0;
    std::set<SequenceId> ids;
    for (const SequenceStep& step : plan.sequences) {
      EXPECT_TRUE(ids.insert(step.id).second);
      ASSERT_TRUE(live_.contains(step.id));
      EXPECT_FALSE(paused_.contains(step.id));
      const auto count = static_cast<int>(step.token_ids.size());
      EXPECT_GE(count, 1);
      num_tokens += count;
      EXPECT_GE(static_cast<int>(step.block_ids.size()) * scenario_.block_tokens,
                step.first_position + count);
      const bool admitted_now = step.first_position != live_.at(step.id).next_position;
      EXPECT_EQ(reference_.CheckStep(step, admitted_now), "") << step.id;
      if (scenario_.roomy && admitted_now) {
        // Foretold: no more than what the cache must have, and no less.
        const int32_t known = scheduler_.Find(step.id)->num_tokens() - (step.samples ? 1 : 0);
        EXPECT_EQ(step.first_position, reference_.MostCached(step.id, known));
      }
    }
    EXPECT_EQ(num_tokens, plan.num_tokens);
    EXPECT_LE(num_tokens, scenario_.token_budget);
    EXPECT_LE(static_cast<int>(plan.sequences.size()), scenario_.max_sequences);
    EXPECT_EQ(plan.num_rows % scenario_.row_multiple, 0);
    EXPECT_GE(plan.num_rows, plan.num_tokens);
    EXPECT_LT(plan.num_rows - plan.num_tokens, scenario_.row_multiple);
  }
  void CheckInvariants() {
    EXPECT_EQ(scheduler_.blocks_unaccounted(), 0);
    EXPECT_EQ(scheduler_.num_waiting() + scheduler_.num_running() + scheduler_.num_preempted(),
              static_cast<int>(live_.size()));
    std::map<int32_t, int32_t> owners;
    for (const auto& [id, expected] : live_) {
      const Sequence* sequence = scheduler_.Find(id);
      ASSERT_NE(sequence, nullptr);
      EXPECT_LE(sequence->num_computed_tokens, sequence->num_tokens());
      EXPECT_LE(sequence->num_tokens(), sequence->max_tokens);
      EXPECT_LE(sequence->num_preemptions, Scheduler::kMaxPreemptions);
      EXPECT_EQ(sequence->state == SequenceState::kRunning, sequence->blocks.num_blocks() > 0);
      for (int32_t block : sequence->blocks.ids()) ++owners[block];
    }
    // With nothing in flight nobody else owns a block.
    if (in_flight_ > 0) return;
    EXPECT_EQ(scheduler_.blocks_used(), static_cast<int32_t>(owners.size()));
    for (const auto& [block, count] : owners) {
      EXPECT_EQ(scheduler_.block_references(block), count) << block;
    }
  }
  void Commit() {
    ++num_operations_;
    auto committed = scheduler_.Commit(*runner_.Collect());
    --in_flight_;
    const std::map<SequenceId, int32_t> ends = std::move(launched_.front());
    launched_.erase(launched_.begin());
    ASSERT_THAT(committed, IsOk());
    for (const CommittedToken& token : committed->tokens) {
      reference_.Commit(token.id, ends.at(token.id), !token.non_finite);
      if (token.non_finite) {
        ++num_non_finite_;
        Forget(token.id);
        continue;
      }
      Expected& expected = live_.at(token.id);
      ASSERT_EQ(static_cast<size_t>(token.output_index), expected.got.size());
      ASSERT_EQ(token.token_id, expected.answer[expected.got.size()]);
      expected.got.push_back(token.token_id);
      const bool stopped = expected.stop_after && expected.got.size() >= *expected.stop_after;
      if (!stopped && expected.got.size() < expected.answer.size()) continue;
      scheduler_.Release(token.id, ReleaseReason::kFinished);
      Forget(token.id);
      ++num_finished_;
    }
    for (const DiscardedToken& token : committed->discarded) {
      EXPECT_FALSE(live_.contains(token.id));
      ++num_discarded_;
    }
    CheckInvariants();
  }

  const Scenario scenario_;
  std::mt19937 random_;
  const SchedulerConfig config_;
  const FakeModel model_;
  Scheduler scheduler_;
  FakeStepRunner runner_;
  SchedulerReference reference_;
  UniformStepsReference uniform_;
  PrefillReference prefills_;
  std::map<SequenceId, Expected> live_;
  PausedSequences paused_{&scheduler_};
  std::vector<std::map<SequenceId, int32_t>> launched_;  // tokens that each sampled row has seen
  int64_t now_ms_ = 0;
  SequenceId next_id_ = 0;
  int in_flight_ = 0;
  int64_t num_finished_ = 0;
  int64_t num_cancelled_ = 0;
  int64_t num_non_finite_ = 0;
  int64_t num_discarded_ = 0;
  int64_t num_operations_ = 0;
};

class SchedulerRandomTest : public testing::TestWithParam<Scenario> {};

// S15, S12: a million and more operations in scenarios of at least 100,000 operations each
// (arrivals, cancels, pauses, clearings, plans, commits).
TEST_P(SchedulerRandomTest, KeepsItsInvariantsAndEveryAnswer) {
  const Scenario& scenario = GetParam();
  SCOPED_TRACE(fmt::format("seed {}", scenario.seed));
  RandomRun run(scenario);
  run.Run(60'000);
  EXPECT_GE(run.operations(), 100'000);
  // The scenario must reach what it is there for.
  const SchedulerCounters counters = run.scheduler().counters();
  if (scenario.uniform_steps) {
    EXPECT_EQ(counters.preemptions_for_blocks + counters.preemptions_for_priority, 0);
  } else if (!scenario.roomy) {
    EXPECT_GT(counters.preemptions_for_blocks, 0);
  }
  if (scenario.num_priorities > 1 && !scenario.uniform_steps) {
    EXPECT_GT(counters.preemptions_for_priority, 0);
  }
  EXPECT_EQ(counters.cache_hit_tokens > 0, scenario.prefix_cache);
  EXPECT_EQ(run.non_finite() > 0, scenario.non_finite_permille > 0);
  EXPECT_EQ(run.discarded() > 0, scenario.run_ahead);
}

INSTANTIATE_TEST_SUITE_P(
    Scenarios, SchedulerRandomTest,
    testing::Values(
        // blocks, block tokens, budget, sequences, rows, run-ahead, cancel %, pause %, seed,
        // cache, priorities, non-finite, clear, roomy, uniform
        Scenario{24, 4, 16, 8, 1, false, 5, 0, 1}, Scenario{24, 4, 16, 8, 8, true, 5, 0, 2},
        Scenario{12, 2, 8, 8, 1, true, 0, 0, 5}, Scenario{9, 16, 64, 16, 8, true, 10, 5, 8},
        Scenario{9, 16, 1, 1, 1, false, 10, 30, 9},
        Scenario{24, 4, 16, 8, 8, false, 5, 10, 3, true},
        Scenario{24, 4, 16, 8, 8, true, 5, 10, 4, true, 1, 2, 1},
        Scenario{12, 2, 8, 8, 1, false, 0, 0, 6, true, 3},
        Scenario{40, 1, 5, 4, 3, true, 2, 5, 7, true, 3, 1},
        Scenario{60, 2, 24, 4, 8, true, 5, 5, 11, true, 3, 5, 2},
        Scenario{30, 3, 7, 6, 8, true, 20, 20, 10, false, 3},
        Scenario{2000, 4, 64, 8, 8, false, 5, 0, 12, true, 1, 0, 0, true},
        Scenario{24, 4, 16, 8, 8, false, 5, 5, 13, false, 3, 2, 0, false, true},
        Scenario{30, 3, 4, 6, 1, true, 5, 10, 14, false, 3, 0, 0, false, true},
        Scenario{24, 4, 5, 8, 8, true, 5, 0, 15, false, 1, 2, 0, false, true}));

}  // namespace
}  // namespace flashquant
