// Memory that cannot be had: the n-th allocation of the engine thread, of a submitting thread or of
// the scheduler fails, for every n until a whole run passes; alone, or with all that follow it.
// Every accepted request ends with exactly one terminal event, nothing crashes, waits or leaks.
// The step runner is left out: its own failures are fault_injection_test's.
#include <algorithm>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "engine/base/error_reason.h"
#include "engine/scheduler/prefix_cache.h"
#include "engine/scheduler/returning_blocks.h"
#include "engine/scheduler/scheduler.h"
#include "fmt/format.h"
#include "tests/engine/core/engine_fixture.h"
#include "tests/support/failing_allocations.h"

namespace flashquant {
namespace {

class SparedRunner final : public StepRunner {
 public:
  explicit SparedRunner(StepRunner* runner) : runner_(runner) {}
  absl::Status Launch(const StepPlan& plan) override {
    const WithoutFaults spared;
    return runner_->Launch(plan);
  }
  absl::StatusOr<StepResult> Collect() override {
    const WithoutFaults spared;
    return runner_->Collect();
  }

 private:
  StepRunner* const runner_;
};

constexpr int kNumRequests = 5;
constexpr int kAnswerTokens = 7;

struct Scenario {
  std::string name;
  std::function<void(EngineConfig*)> configure = [](EngineConfig*) {};
  std::function<void(int, GenerateRequest*)> request = [](int, GenerateRequest*) {};
  std::function<void(FakeStepRunner*)> runner = [](FakeStepRunner*) {};
  int num_cancelled = 0;  // of the first requests, before the engine has looked
};

std::ostream& operator<<(std::ostream& out, const Scenario& scenario) {
  return out << scenario.name;
}

// What became of the requests of one engine.
struct Outcome {
  int num_ok = 0;
  int num_refused = 0;  // by the inbox, for want of memory
  int num_failed = 0;   // with the engine
  int num_other = 0;    // what the scenario wants
  bool engine_failed = false;
};

class AllocationFailureTest : public testing::TestWithParam<Scenario> {
 protected:
  // All of one engine's life. Whatever it allocated is given back.
  Outcome Run(const Scenario& scenario, Fault engine_fault) {
    allocation_failed.store(false);
    const int64_t living = num_living_allocations.load();
    Outcome outcome;
    RunEngine(scenario, engine_fault, &outcome);
    EXPECT_EQ(num_living_allocations.load(), living);
    return outcome;
  }

  static std::vector<int32_t> PromptOf(int i) { return {1, 2, 3, 4, 5, i % 2}; }

  const FakeModel model_;

 private:
  void RunEngine(const Scenario& scenario, Fault engine_fault, Outcome* outcome) {
    EngineConfig config = SmallConfig();
    config.max_sequences = 4;
    config.num_blocks = 10;  // some are preempted
    config.max_waiting = kNumRequests;
    scenario.configure(&config);
    FakeStepRunner runner(config.num_blocks, config.block_tokens, model_);
    scenario.runner(&runner);
    SparedRunner spared(&runner);
    ThreadStartClock clock(engine_fault);
    int num_failures = 0;
    EngineDependencies dependencies;
    dependencies.runner = &spared;
    dependencies.clock = &clock;
    dependencies.vocab_size = model_.vocab_size;
    dependencies.on_failure = [&](const absl::Status&) { ++num_failures; };
    auto engine = Engine::Create(config, dependencies);
    FQ_EXPECT_OK(engine);
    std::vector<std::shared_ptr<RequestStream>> streams;
    for (int i = 0; i < kNumRequests; ++i) {
      GenerateRequest request = Request(fmt::format("request {}", i), PromptOf(i), kAnswerTokens);
      scenario.request(i, &request);
      auto stream = (*engine)->Submit(std::move(request));
      FQ_EXPECT_OK(stream);
      streams.push_back(*stream);
      if (i < scenario.num_cancelled) streams.back()->Cancel(CancelReason::kClient);
    }
    clock.Start();
    for (int i = 0; i < kNumRequests; ++i) {
      Count(ReadAll(*streams[static_cast<size_t>(i)]), i, outcome);
      EXPECT_TRUE(streams[static_cast<size_t>(i)]->Take().empty());
    }
    CheckEnd(engine->get(), outcome);
    engine->reset();  // waits for its thread
    // With run-ahead a last step may still fly when the last request has ended, and fail then.
    EXPECT_LE(num_failures, 1);
    EXPECT_TRUE(num_failures == 1 || !outcome->engine_failed);
    outcome->engine_failed = num_failures == 1;
    EXPECT_EQ(runner.violation(), "");
  }

  void CheckEnd(Engine* engine, Outcome* outcome) {
    const bool drained = engine->Drain(TimePoint::max());
    outcome->engine_failed = engine->health() == EngineHealth::kFailed;
    EXPECT_TRUE(drained);
    const auto refused = engine->Submit(Request("later", {1}, 2));
    const std::string reason = ReasonOf(refused.status());
    if (outcome->num_failed > 0) {
      EXPECT_EQ(reason, "ENGINE_FAILED");
    } else if (engine->health() ==
               EngineHealth::kFailed) {  // perhaps since a moment, see RunEngine
      EXPECT_TRUE(reason == "ENGINE_FAILED" || reason == "DRAINING") << reason;
    } else {
      EXPECT_EQ(reason, "DRAINING");
    }
    EXPECT_EQ(engine->stats().requests_running + engine->stats().requests_waiting, 0);
    // A failed device may still write to the blocks of its last step.
    EXPECT_TRUE(engine->stats().kv_blocks_used == 0 || outcome->engine_failed);
    EXPECT_EQ(engine->stats().kv_blocks_unaccounted, 0);
  }

  // A good answer is that of the request alone; what a failed one brought is its beginning.
  void Count(const Answer& answer, int i, Outcome* outcome) {
    const std::vector<int32_t> alone = model_.Answer(PromptOf(i), 0, kAnswerTokens);
    ASSERT_LE(answer.tokens.size(), alone.size());
    EXPECT_TRUE(std::equal(answer.tokens.begin(), answer.tokens.end(), alone.begin()));
    const std::string& reason = answer.finished.error_reason;
    if (answer.finished.status.ok()) {
      EXPECT_EQ(answer.tokens.size(), alone.size());
      ++outcome->num_ok;
    } else if (reason == "ENGINE_FAILED") {
      ++outcome->num_failed;
    } else if (reason == "QUEUE_FULL") {
      EXPECT_TRUE(absl::IsResourceExhausted(answer.finished.status));
      EXPECT_TRUE(answer.tokens.empty());
      ++outcome->num_refused;
    } else {
      ++outcome->num_other;
    }
  }
};

// S7, S8
TEST_P(AllocationFailureTest, AnyAllocationOfTheEngineThreadMayFail) {
  const Outcome undisturbed = Run(GetParam(), Fault{});
  for (const bool for_good : {false, true}) {
    int num_refusals = 0;
    int num_failures = 0;
    for (int64_t n = 0; !HasFailure(); ++n) {
      SCOPED_TRACE(fmt::format("allocation {}{}", n, for_good ? " and all that follow" : ""));
      const Outcome outcome = Run(GetParam(), {.left = n, .for_good = for_good});
      if (!allocation_failed.load()) {  // the whole run needs fewer allocations
        EXPECT_EQ(outcome.num_ok, undisturbed.num_ok);
        EXPECT_EQ(outcome.num_other, undisturbed.num_other);
        break;
      }
      // What an exception interrupted is in no known state: the engine ends, and says so to all. A
      // request that finds no memory on its way in is refused alone.
      EXPECT_TRUE(outcome.engine_failed || outcome.num_failed == 0);
      EXPECT_TRUE(for_good || outcome.num_refused <= 1);
      num_refusals += outcome.num_refused;
      num_failures += outcome.engine_failed ? 1 : 0;
    }
    EXPECT_GT(num_refusals, 10);
    EXPECT_GT(num_failures, 50);
  }
}

Scenario Named(const char* name) {
  Scenario scenario;
  scenario.name = name;
  return scenario;
}

std::vector<Scenario> Scenarios() {
  Scenario run_ahead = Named("run_ahead");
  run_ahead.configure = [](EngineConfig* config) { config->run_ahead = true; };
  run_ahead.request = [](int i, GenerateRequest* request) {
    // Longer than what a string holds in itself.
    request->cache_salt = fmt::format("the salt of the tenant number {}", i / 2);
    request->sampling.top_logprobs = 2;
  };
  Scenario deterministic = Named("deterministic");
  deterministic.configure = [](EngineConfig* config) {
    config->deterministic = true;
    config->num_blocks = 20;
  };
  Scenario cancelled = Named("cancelled_and_penalized");
  cancelled.num_cancelled = 2;
  cancelled.request = [](int, GenerateRequest* request) {
    request->sampling.repetition_penalty = 1.2f;
  };
  Scenario non_finite = Named("non_finite");
  non_finite.runner = [](FakeStepRunner* runner) {
    runner->SetNonFinite(
        [](const SequenceStep& step) { return step.id == 1 && step.output_position == 3; });
  };
  // The way out of a failed engine fails too.
  Scenario device = Named("device_error");
  device.runner = [](FakeStepRunner* runner) { runner->FailCollect(4); };
  return {Named("plain"), run_ahead, deterministic, cancelled, non_finite, device};
}

INSTANTIATE_TEST_SUITE_P(All, AllocationFailureTest, testing::ValuesIn(Scenarios()),
                         [](const auto& test) { return test.param.name; });

// S7: the queue's push
TEST_F(AllocationFailureTest, ARequestThatFindsNoMemoryIsRefusedAlone) {
  EngineConfig config = SmallConfig();
  FakeStepRunner runner(config.num_blocks, config.block_tokens, model_);
  EngineDependencies dependencies;
  dependencies.runner = &runner;
  dependencies.vocab_size = model_.vocab_size;
  auto engine = Engine::Create(config, dependencies);
  FQ_ASSERT_OK(engine);
  for (const bool for_good : {false, true}) {
    bool passed = false;
    for (int64_t n = 0; !passed && !HasFailure(); ++n) {
      SCOPED_TRACE(fmt::format("allocation {}", n));
      ASSERT_LT(n, 1000);
      const std::string id = fmt::format("a request that is submitted: {} {}", n, for_good);
      GenerateRequest request = Request(id, PromptOf(0), kAnswerTokens);
      allocation_failed.store(false);
      fault = {.left = n, .for_good = for_good};
      auto stream = (*engine)->Submit(std::move(request));
      fault = {};
      passed = !allocation_failed.load();
      if (!stream.ok()) {
        EXPECT_FALSE(passed);
        EXPECT_TRUE(absl::IsResourceExhausted(stream.status()));
        EXPECT_EQ(ReasonOf(stream.status()), "QUEUE_FULL");
        stream = (*engine)->Submit(Request(id, PromptOf(0), kAnswerTokens));  // nothing was taken
      }
      FQ_ASSERT_OK(stream);
      const Answer answer = ReadAll(**stream);
      FQ_EXPECT_OK(answer.finished.status);
      EXPECT_EQ(answer.tokens, model_.Answer(PromptOf(0), 0, kAnswerTokens));
    }
  }
  EXPECT_EQ((*engine)->stats().kv_blocks_used, 0);
}

// S7: requests for blocks, and inserts into the prefix cache
TEST(BlocksWithoutMemoryTest, BlocksAreHandedOutKeptSharedAndGivenBack) {
  constexpr int32_t kBlockTokens = 2;
  BlockAllocator allocator(64);
  PrefixCache cache(&allocator, kBlockTokens);
  ReturningBlocksMemory returning_memory(64);
  BlockTable first(&allocator), second(&allocator), third(&allocator);
  for (BlockTable* table : {&first, &second, &third}) table->Reserve(63);
  std::vector<int32_t> tokens(40);
  std::vector<int32_t> ids;
  ids.reserve(63);
  const auto publish = [&](const BlockTable& blocks, std::string_view salt) {
    PrefixChain chain;
    for (int32_t i = 0; i < blocks.num_blocks(); ++i) {
      const std::span<const int32_t> all(tokens);
      cache.Extend(salt, all.subspan(static_cast<size_t>(i * kBlockTokens), kBlockTokens),
                   blocks.ids()[static_cast<size_t>(i)], &chain);
    }
    return chain;
  };
  const int64_t before = num_allocations_of_this_thread;
  ASSERT_TRUE(first.Grow(20));
  EXPECT_EQ(publish(first, "salt").num_blocks, 20);
  EXPECT_EQ(cache.Find("salt", tokens, 20, &ids).num_blocks, 20);
  second.Share(ids);
  ReturningBlocks returning(&allocator, &returning_memory);
  returning.Add(first);
  EXPECT_EQ(returning.count(), 0);
  returning.Add(second);
  EXPECT_EQ(returning.count(), 20);
  first.Clear();
  second.Clear();
  EXPECT_EQ(allocator.num_idle(), 20);
  ASSERT_TRUE(third.Grow(50));  // takes seven of the idle ones
  EXPECT_EQ(cache.num_nodes(), 13);
  third.Clear();
  cache.Clear();
  EXPECT_EQ(allocator.num_free(), 63);
  EXPECT_EQ(num_allocations_of_this_thread, before);
}

TEST(BlocksWithoutMemoryTest, ASaltThatFindsNoMemoryIsNotKept) {
  BlockAllocator allocator(8);
  PrefixCache cache(&allocator, 2);
  BlockTable table(&allocator);
  ASSERT_TRUE(table.Grow(2));
  const std::vector<int32_t> tokens = {1, 2};
  const std::string salt = "longer than what a string holds in itself";
  PrefixChain chain;
  fault = {.left = 0};
  const int32_t kept = cache.Extend(salt, tokens, table.ids()[0], &chain);
  fault = {};
  EXPECT_EQ(kept, -1);
  EXPECT_TRUE(chain.broken);
  EXPECT_EQ(cache.num_nodes(), 0);
  PrefixChain again;
  EXPECT_EQ(cache.Extend(salt, tokens, table.ids()[0], &again), table.ids()[0]);
  table.Clear();
  EXPECT_EQ(allocator.num_idle(), 1);
}

}  // namespace
}  // namespace flashquant
