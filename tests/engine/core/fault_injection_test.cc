// Injected faults: the n-th step, one row. Whatever happens, every accepted request ends with
// exactly one terminal event and nothing is left behind.
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "tests/engine/core/engine_fixture.h"

namespace flashquant {
namespace {

constexpr int kNumRequests = 5;

// What became of the requests of one engine.
struct Outcome {
  int num_ok = 0;
  int num_failed = 0;
  bool engine_failed = false;
};

// Five requests, two of them alike and one too many for the first step; `arrange` sets the fault.
class FaultInjectionTest : public testing::Test {
 protected:
  Outcome RunWith(const std::function<void(FakeStepRunner*)>& arrange) {
    EngineConfig config = SmallConfig();
    config.max_sequences = 4;
    config.num_blocks = 12;  // some are preempted
    config.max_waiting = kNumRequests;
    FakeStepRunner runner(config.num_blocks, config.block_tokens, model_);
    arrange(&runner);
    EngineDependencies dependencies;
    dependencies.runner = &runner;
    dependencies.vocab_size = model_.vocab_size;
    auto engine = Engine::Create(config, dependencies);
    FQ_EXPECT_OK(engine);
    runner.CloseGate();
    std::vector<std::shared_ptr<RequestStream>> streams;
    for (int i = 0; i < kNumRequests; ++i) {
      auto stream = (*engine)->Submit(Request(fmt::format("r{}", i), PromptOf(i), 12));
      // Refused once the engine has failed: nobody is owed an answer then.
      if (stream.ok()) streams.push_back(*stream);
    }
    runner.OpenGate();
    Outcome outcome;
    for (size_t i = 0; i < streams.size(); ++i) Count(ReadAll(*streams[i]), i, &outcome);
    outcome.engine_failed = (*engine)->health() == EngineHealth::kFailed;
    const bool drained = (*engine)->Drain(std::chrono::steady_clock::now() + kLimit);
    EXPECT_TRUE(drained || outcome.engine_failed);
    if (!outcome.engine_failed) {
      EXPECT_EQ((*engine)->stats().kv_blocks_used, 0);
      EXPECT_EQ((*engine)->stats().kv_blocks_unaccounted, 0);
    }
    EXPECT_EQ(runner.violation(), "");
    return outcome;
  }

 private:
  static constexpr auto kLimit = std::chrono::seconds(10);

  static std::vector<int32_t> PromptOf(int i) { return {1, 2, 3, 4, 5, i % 2}; }
  // A good answer is that of the request alone; what a failed one brought is its beginning.
  void Count(const Answer& answer, size_t i, Outcome* outcome) {
    const std::vector<int32_t> alone = model_.Answer(PromptOf(static_cast<int>(i)), 0, 12);
    ASSERT_LE(answer.tokens.size(), alone.size());
    EXPECT_TRUE(std::equal(answer.tokens.begin(), answer.tokens.end(), alone.begin()));
    if (answer.finished.status.ok()) {
      EXPECT_EQ(answer.tokens.size(), alone.size());
      ++outcome->num_ok;
    } else {
      EXPECT_NE(answer.finished.error_reason, "");
      ++outcome->num_failed;
    }
  }
  const FakeModel model_;
};

TEST_F(FaultInjectionTest, AnyStepMayFailToLaunchToBeCollectedOrThrow) {  // G3, L11
  using Arrange = void (FakeStepRunner::*)(int);
  for (const Arrange arrange : {&FakeStepRunner::FailLaunch, &FakeStepRunner::FailCollect,
                                &FakeStepRunner::ThrowInLaunch}) {
    bool ended_well = false;
    for (int n = 1; !ended_well && !HasFailure(); ++n) {
      SCOPED_TRACE(fmt::format("step {}", n));
      ASSERT_LT(n, 1000);
      const Outcome outcome = RunWith([&](FakeStepRunner* runner) { (runner->*arrange)(n); });
      ended_well = !outcome.engine_failed;
      EXPECT_EQ(outcome.num_failed > 0, outcome.engine_failed);
    }
  }
}

// Found by fuzzing (tests/fuzz/server_fuzz.cc): the step that ran at that moment took the ring that
// was to end the thread.
TEST_F(FaultInjectionTest, AnEngineThatIsDestroyedRightAfterItsDrainEnds) {
  for (int i = 0; i < 1000 && !HasFailure(); ++i) {
    EXPECT_EQ(RunWith([](FakeStepRunner*) {}).num_ok, kNumRequests);
  }
}

TEST_F(FaultInjectionTest, ARowThatIsNotFiniteEndsItsRequestAlone) {  // T12
  for (SequenceId id = 0; id < kNumRequests; ++id) {
    for (int64_t position = 0; position < 12; ++position) {
      SCOPED_TRACE(fmt::format("request {}, token {}", id, position));
      const Outcome outcome = RunWith([&](FakeStepRunner* runner) {
        runner->SetNonFinite([&](const SequenceStep& step) {
          return step.id == id && step.output_position == position;
        });
      });
      EXPECT_EQ(outcome.num_failed, 1);
      EXPECT_EQ(outcome.num_ok, kNumRequests - 1);
      EXPECT_FALSE(outcome.engine_failed);
    }
  }
}

}  // namespace
}  // namespace flashquant
