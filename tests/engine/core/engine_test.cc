// The engine with a pretended model: answers, limits, ends, drain and failures.
#include "engine/engine.h"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/error_reason.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_step_runner.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using std::chrono::seconds;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::StrEq;

EngineConfig SmallConfig() {
  EngineConfig config;
  config.context_length = 64;
  config.max_sequences = 8;
  config.token_budget = 16;
  config.max_waiting = 4;
  config.block_tokens = 4;
  config.num_blocks = 65;
  return config;
}

GenerateRequest Request(std::string id, std::vector<int32_t> prompt, int max_output_tokens) {
  GenerateRequest request;
  request.request_id = std::move(id);
  request.prompt_tokens = std::move(prompt);
  request.stop.max_output_tokens = max_output_tokens;
  return request;
}

struct Answer {
  std::vector<int32_t> tokens;
  FinishedEvent finished;
};

Answer ReadAll(RequestStream& stream) {
  Answer answer;
  while (true) {
    StreamUpdate update = stream.WaitAndTake();
    answer.tokens.insert(answer.tokens.end(), update.token_ids.begin(), update.token_ids.end());
    if (!update.finished) continue;
    answer.finished = *update.finished;
    return answer;
  }
}

class EngineTest : public testing::Test {
 protected:
  void Start(EngineConfig config) {
    runner_ = std::make_unique<FakeStepRunner>(config.num_blocks, config.block_tokens, model_);
    config_ = config;
  }
  Engine& engine() {
    if (engine_ == nullptr) {
      EngineDependencies dependencies = dependencies_;
      dependencies.runner = runner_.get();
      dependencies.clock = &clock_;
      dependencies.vocab_size = model_.vocab_size;
      auto engine = Engine::Create(config_, dependencies);
      FQ_EXPECT_OK(engine);
      engine_ = *std::move(engine);
    }
    return *engine_;
  }
  std::shared_ptr<RequestStream> Submit(GenerateRequest request) {
    auto stream = engine().Submit(std::move(request));
    FQ_EXPECT_OK(stream);
    return *stream;
  }
  // Everything is back: no request, no block.
  void ExpectIdle() {
    engine_->Drain(clock_.Now() + seconds(60));
    engine_.reset();
    EXPECT_EQ(runner_->violation(), "");
  }
  void TearDown() override {
    if (engine_ != nullptr) ExpectIdle();
  }

  FakeModel model_;
  FakeClock clock_;
  EngineDependencies dependencies_;
  EngineConfig config_;
  std::unique_ptr<FakeStepRunner> runner_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineTest, AnswersWithTheModelsTokensAndEndsByLength) {
  Start(SmallConfig());
  const auto stream = Submit(Request("a", {1, 2, 3}, 5));
  const Answer answer = ReadAll(*stream);
  FQ_EXPECT_OK(answer.finished.status);
  EXPECT_EQ(answer.finished.reason, FinishReason::kLength);
  EXPECT_THAT(answer.tokens, ElementsAreArray(model_.Answer({1, 2, 3}, 0, 5)));
  EXPECT_EQ(answer.finished.usage.prompt_tokens, 3);
  EXPECT_EQ(answer.finished.usage.output_tokens, 5);
}

TEST_F(EngineTest, ATokenOfTheEndSetEndsTheAnswerAndIsCounted) {
  Start(SmallConfig());
  const std::vector<int32_t> all = model_.Answer({7}, 3, 10);
  dependencies_.eos_token_ids = {all[4]};
  GenerateRequest request = Request("a", {7}, 10);
  request.sampling.seed = 3;
  const Answer answer = ReadAll(*Submit(request));
  EXPECT_EQ(answer.finished.reason, FinishReason::kEos);
  EXPECT_EQ(answer.finished.matched_token, all[4]);
  EXPECT_EQ(answer.finished.usage.output_tokens, 5);
  EXPECT_THAT(answer.tokens, ElementsAreArray(all.begin(), all.begin() + 5));
}

TEST_F(EngineTest, AnEndTokenAsTheFirstTokenGivesOneOutputToken) {
  Start(SmallConfig());
  dependencies_.eos_token_ids = {model_.Answer({7}, 0, 1)[0]};
  const Answer answer = ReadAll(*Submit(Request("a", {7}, 10)));
  EXPECT_EQ(answer.finished.reason, FinishReason::kEos);
  EXPECT_EQ(answer.finished.usage.output_tokens, 1);
}

TEST_F(EngineTest, ARequestWithoutALimitEndsAtTheLastSlotOfTheContext) {
  Start(SmallConfig());
  GenerateRequest request = Request("a", {1, 2, 3, 4}, 0);
  request.stop.limited_by_context = true;
  const Answer answer = ReadAll(*Submit(request));
  EXPECT_EQ(answer.finished.reason, FinishReason::kContextLength);
  EXPECT_EQ(answer.finished.usage.output_tokens, 60);
}

TEST_F(EngineTest, RefusesWhatCouldNeverFit) {
  EngineConfig config = SmallConfig();
  config.num_blocks = 9;  // 8 usable, 32 tokens
  Start(config);
  const auto refuse = [&](GenerateRequest request, std::string_view reason,
                          const std::string& text) {
    const auto stream = engine().Submit(std::move(request));
    EXPECT_THAT(stream, StatusIs(absl::StatusCode::kInvalidArgument, StrEq(text)));
    EXPECT_EQ(ReasonOf(stream.status()), reason);
  };
  refuse(Request("a", {}, 1), "EMPTY_PROMPT", "prompt: must not be empty");
  refuse(Request("a", std::vector<int32_t>(64, 1), 1), "CONTEXT_LENGTH_EXCEEDED",
         "prompt: no room for output (context 64, prompt 64)");
  refuse(Request("a", {1, 2}, 63), "CONTEXT_LENGTH_EXCEEDED",
         "prompt + max_output_tokens: exceeds context (limit 64, got 65)");
  refuse(Request("a", {1, 2}, INT32_MAX), "CONTEXT_LENGTH_EXCEEDED",
         "prompt + max_output_tokens: exceeds context (limit 64, got 2147483649)");
  refuse(Request("a", {1}, 0), "PARAMETER_OUT_OF_RANGE",
         "stop.max_output_tokens: must be at least 1");
  refuse(Request("a", {1, 1000}, 1), "TOKEN_ID_OUT_OF_RANGE",
         "prompt.token_ids[1]: out of range (limit 1000, got 1000)");
  refuse(Request("a", {-1}, 1), "TOKEN_ID_OUT_OF_RANGE",
         "prompt.token_ids[0]: out of range (limit 1000, got -1)");
  refuse(Request("a", {1, 2, 3}, 31), "KV_CAPACITY_EXCEEDED", "request needs 9 KV blocks, 8 exist");
  // Exactly the pool, and the next one is served.
  EXPECT_EQ(ReadAll(*Submit(Request("a", {1, 2, 3}, 30))).tokens.size(), 30u);
}

TEST_F(EngineTest, RefusesADeadlineThatHasPassed) {
  Start(SmallConfig());
  GenerateRequest request = Request("a", {1}, 3);
  request.deadline = clock_.Now();
  EXPECT_THAT(engine().Submit(request),
              StatusIs(absl::StatusCode::kDeadlineExceeded, StrEq("deadline exceeded")));
  EXPECT_EQ(runner_->num_launched(), 0);
}

TEST_F(EngineTest, AnIdIsUniqueAmongTheRunningAndFreeAfterTheEnd) {
  Start(SmallConfig());
  runner_->CloseGate();
  const auto first = Submit(Request("same", {1}, 3));
  const auto second = engine().Submit(Request("same", {2}, 3));
  EXPECT_THAT(second, StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("request_id")));
  EXPECT_EQ(ReasonOf(second.status()), "DUPLICATE_REQUEST_ID");
  runner_->OpenGate();
  EXPECT_EQ(ReadAll(*first).tokens.size(), 3u);
  EXPECT_EQ(ReadAll(*Submit(Request("same", {2}, 3))).tokens.size(), 3u);
}

TEST_F(EngineTest, AFullQueueRefusesAtOnceWithTheLimit) {
  EngineConfig config = SmallConfig();
  config.max_sequences = 1;
  Start(config);
  runner_->CloseGate();
  std::vector<std::shared_ptr<RequestStream>> streams = {Submit(Request("running", {1}, 2))};
  runner_->WaitUntilAtGate();
  for (int i = 0; i < 4; ++i) streams.push_back(Submit(Request(std::to_string(i), {1}, 2)));
  const auto refused = engine().Submit(Request("one too many", {1}, 2));
  EXPECT_THAT(refused,
              StatusIs(absl::StatusCode::kResourceExhausted, StrEq("queue full (limit 4)")));
  EXPECT_EQ(ReasonOf(refused.status()), "QUEUE_FULL");
  runner_->OpenGate();
  for (const auto& stream : streams) EXPECT_EQ(ReadAll(*stream).tokens.size(), 2u);
}

TEST_F(EngineTest, ARequestThatWaitsTooLongIsNeverScheduled) {
  EngineConfig config = SmallConfig();
  config.max_sequences = 1;
  Start(config);
  runner_->CloseGate();
  const auto running = Submit(Request("running", {1}, 2));
  runner_->WaitUntilAtGate();
  GenerateRequest request = Request("waiting", {1}, 2);
  request.queue_deadline = clock_.Now() + seconds(5);
  const auto waiting = Submit(request);
  clock_.Advance(seconds(6));
  runner_->OpenGate();
  const Answer answer = ReadAll(*waiting);
  EXPECT_THAT(answer.finished.status,
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("queue_timeout")));
  EXPECT_EQ(answer.finished.error_reason, "QUEUE_TIMEOUT");
  EXPECT_TRUE(answer.tokens.empty());
  EXPECT_EQ(ReadAll(*running).tokens.size(), 2u);
}

TEST_F(EngineTest, ADeadlineEndsARunningRequestAtTheNextStep) {
  Start(SmallConfig());
  runner_->CloseGate();
  GenerateRequest request = Request("a", {1}, 50);
  request.deadline = clock_.Now() + seconds(5);
  const auto stream = Submit(request);
  runner_->WaitUntilAtGate();
  clock_.Advance(seconds(5));
  runner_->OpenGate();
  const Answer answer = ReadAll(*stream);
  EXPECT_THAT(answer.finished.status,
              StatusIs(absl::StatusCode::kDeadlineExceeded, StrEq("deadline exceeded")));
  EXPECT_EQ(answer.tokens.size(), 1u);
}

TEST_F(EngineTest, ACancelEndsARunningRequestAtTheNextStep) {
  Start(SmallConfig());
  runner_->CloseGate();
  const auto stream = Submit(Request("a", {1}, 50));
  runner_->WaitUntilAtGate();
  stream->Cancel(CancelReason::kClient);
  stream->Cancel(CancelReason::kSlowReader);  // too late: the first reason stays
  runner_->OpenGate();
  const Answer answer = ReadAll(*stream);
  EXPECT_EQ(answer.finished.status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(answer.tokens.size(), 1u);
}

TEST_F(EngineTest, AStreamThatIsNotReadIsPausedAndGoesOnAfterwards) {
  EngineConfig config = SmallConfig();
  config.context_length = 1024;
  config.num_blocks = 600;
  Start(config);
  const auto unread = Submit(Request("unread", {1}, 1000));
  // 400 steps of another request: the unread one would be done in 1000.
  EXPECT_EQ(ReadAll(*Submit(Request("read", {2}, 400))).tokens.size(), 400u);
  EXPECT_EQ(unread->pending_tokens(), RequestStream::kMaxPendingTokens);
  const Answer answer = ReadAll(*unread);
  FQ_EXPECT_OK(answer.finished.status);
  EXPECT_THAT(answer.tokens, ElementsAreArray(model_.Answer({1}, 0, 1000)));
}

TEST_F(EngineTest, ACancelWakesAnEngineWhoseStreamsAreAllPaused) {
  EngineConfig config = SmallConfig();
  config.context_length = 1024;
  config.num_blocks = 600;
  Start(config);
  const auto stream = Submit(Request("a", {1}, 1000));
  while (engine().stats().requests_paused == 0) std::this_thread::yield();
  stream->Cancel(CancelReason::kSlowReader);
  const Answer answer = ReadAll(*stream);
  EXPECT_THAT(answer.finished.status,
              StatusIs(absl::StatusCode::kResourceExhausted, StrEq("client does not read")));
  EXPECT_EQ(answer.finished.error_reason, "SLOW_READER");
}

TEST_F(EngineTest, ADeadlineIsSeenWhenTheStreamIsPaused) {
  EngineConfig config = SmallConfig();
  config.context_length = 1024;
  config.num_blocks = 600;
  Start(config);
  GenerateRequest request = Request("a", {1}, 1000);
  request.deadline = clock_.Now() + seconds(3600);
  const auto stream = Submit(request);
  while (engine().stats().requests_paused == 0) std::this_thread::yield();
  clock_.Advance(seconds(3601));
  engine().NotifyCancelled();
  EXPECT_EQ(ReadAll(*stream).finished.status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(EngineTest, ANonFiniteRowEndsOnlyItsRequest) {
  for (bool run_ahead : {false, true}) {
    EngineConfig config = SmallConfig();
    config.run_ahead = run_ahead;
    Start(config);
    runner_->SetNonFinite([](const SequenceStep& step) {
      return step.sampling->seed == 13 && step.output_position == 2;
    });
    GenerateRequest bad = Request("bad", {1}, 20);
    bad.sampling.seed = 13;
    const auto bad_stream = Submit(bad);
    const auto good_stream = Submit(Request("good", {1}, 20));
    const Answer answer = ReadAll(*bad_stream);
    EXPECT_THAT(answer.finished.status,
                StatusIs(absl::StatusCode::kInternal, StrEq("model produced non-finite values")));
    EXPECT_EQ(answer.finished.error_reason, "NON_FINITE_LOGITS");
    EXPECT_EQ(answer.tokens.size(), 2u);
    EXPECT_THAT(ReadAll(*good_stream).tokens, ElementsAreArray(model_.Answer({1}, 0, 20)));
    ExpectIdle();
  }
}

TEST_F(EngineTest, ADrainLetsAcceptedRequestsFinishAndRefusesNewOnes) {
  Start(SmallConfig());
  const auto stream = Submit(Request("a", {1}, 30));
  EXPECT_TRUE(engine().Drain(clock_.Now() + seconds(60)));
  EXPECT_EQ(engine().health(), EngineHealth::kDraining);
  const auto refused = engine().Submit(Request("b", {1}, 2));
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kUnavailable, StrEq("server is shutting down")));
  EXPECT_EQ(ReasonOf(refused.status()), "DRAINING");
  EXPECT_EQ(ReadAll(*stream).tokens.size(), 30u);
}

TEST_F(EngineTest, ADrainEndsWhatIsLeftAtItsDeadline) {
  EngineConfig config = SmallConfig();
  config.context_length = 1024;
  config.num_blocks = 600;
  Start(config);
  const auto stream = Submit(Request("never read", {1}, 1000));
  EXPECT_FALSE(engine().Drain(clock_.Now()));
  const Answer answer = ReadAll(*stream);
  EXPECT_THAT(answer.finished.status,
              StatusIs(absl::StatusCode::kUnavailable, StrEq("server is shutting down")));
  EXPECT_EQ(answer.finished.error_reason, "DRAINING");
}

TEST_F(EngineTest, DestroyingTheEngineEndsWhatRuns) {
  for (bool run_ahead : {false, true}) {
    EngineConfig config = SmallConfig();
    config.run_ahead = run_ahead;
    config.context_length = 1024;
    config.num_blocks = 600;
    Start(config);
    const auto stream = Submit(Request("a", {1}, 1000));
    engine_.reset();
    EXPECT_EQ(ReadAll(*stream).finished.status.code(), absl::StatusCode::kUnavailable);
    stream->Cancel(CancelReason::kClient);  // a stream may outlive its engine
  }
}

// Every request that the engine took ends, whatever fails and when.
TEST_F(EngineTest, AFailedStepEndsAllRequestsAndTheEngine) {
  enum class Kind { kLaunch, kCollect, kThrow };
  for (Kind kind : {Kind::kLaunch, Kind::kCollect, Kind::kThrow}) {
    for (int n : {1, 2, 5}) {
      for (bool run_ahead : {false, true}) {
        EngineConfig config = SmallConfig();
        config.run_ahead = run_ahead;
        Start(config);
        if (kind == Kind::kLaunch) runner_->FailLaunch(n);
        if (kind == Kind::kCollect) runner_->FailCollect(n);
        if (kind == Kind::kThrow) runner_->ThrowInLaunch(n);
        absl::Status reported;
        dependencies_.on_failure = [&](const absl::Status& status) { reported = status; };
        std::vector<std::shared_ptr<RequestStream>> streams;
        for (int i = 0; i < 4; ++i) {
          auto stream = engine().Submit(Request(std::to_string(i), {i}, 40));
          if (stream.ok()) streams.push_back(*stream);
        }
        for (const auto& stream : streams) {
          const Answer answer = ReadAll(*stream);
          EXPECT_THAT(answer.finished.status,
                      StatusIs(absl::StatusCode::kUnavailable, StrEq("engine failed")));
          EXPECT_EQ(answer.finished.error_reason, "ENGINE_FAILED");
        }
        EXPECT_EQ(engine().health(), EngineHealth::kFailed);
        const auto refused = engine().Submit(Request("later", {1}, 2));
        EXPECT_EQ(ReasonOf(refused.status()), "ENGINE_FAILED");
        EXPECT_THAT(engine().failure(),
                    StatusIs(absl::StatusCode::kInternal, HasSubstr("injected")));
        const int launched = runner_->num_launched();
        engine_.reset();
        EXPECT_EQ(runner_->num_launched(), launched);  // no device call after the failure
        EXPECT_FALSE(reported.ok());
      }
    }
  }
}

TEST_F(EngineTest, CreateRefusesAConfigurationThatIsNotFilledIn) {
  EngineConfig config = SmallConfig();
  Start(config);
  EngineDependencies dependencies;
  dependencies.runner = runner_.get();
  config.context_length = 0;
  EXPECT_THAT(Engine::Create(config, dependencies),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("context_length")));
  config = SmallConfig();
  config.num_blocks = 0;
  EXPECT_THAT(Engine::Create(config, dependencies),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("num_blocks")));
  config = SmallConfig();
  config.token_budget = 7;
  EXPECT_THAT(Engine::Create(config, dependencies),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       StrEq("token_budget: must be at least max_sequences (limit 8, got 7)")));
}

}  // namespace
}  // namespace flashquant
