// Answers, limits, the queue, cancels and deadlines.
#include "engine/engine.h"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/error_reason.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/core/engine_fixture.h"

namespace flashquant {
namespace {

using std::chrono::seconds;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::StrEq;

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

// T10
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
  const LateQueue queue = LetOneWaitTooLong();
  const Answer answer = ReadAll(*queue.waiting);
  EXPECT_THAT(answer.finished.status,
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("queue_timeout")));
  EXPECT_EQ(answer.finished.error_reason, "QUEUE_TIMEOUT");
  EXPECT_TRUE(answer.tokens.empty());
  EXPECT_EQ(ReadAll(*queue.running).tokens.size(), 2u);
}

// S6
TEST_F(EngineTest, PrioritiesAndTheirAgeingOrderTheQueue) {
  EngineConfig config = SmallConfig();
  config.max_sequences = 1;
  Start(config);
  std::vector<int32_t> order;  // of the prompts' first tokens
  runner_->OnLaunch([&](const StepPlan& plan) { order.push_back(plan.sequences[0].token_ids[0]); });
  runner_->CloseGate();
  const auto with_priority = [&](int32_t token, int priority) {
    GenerateRequest request = Request(std::to_string(token), {token}, 1);
    request.priority = priority;
    return Submit(request);
  };
  std::vector<std::shared_ptr<RequestStream>> streams = {with_priority(1, 0)};
  runner_->WaitUntilAtGate();
  streams.push_back(with_priority(2, -1));
  clock_.Advance(seconds(1));
  streams.push_back(with_priority(3, 1));  // two steps are worth four seconds
  clock_.Advance(seconds(4));
  streams.push_back(with_priority(4, 1));
  runner_->OpenGate();
  for (const auto& stream : streams) FQ_EXPECT_OK(ReadAll(*stream).finished.status);
  EXPECT_THAT(order, testing::ElementsAre(1, 3, 2, 4));
}

TEST_F(EngineTest, UsageTellsHowMuchOfThePromptWasFound) {
  Start(SmallConfig());
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  EXPECT_EQ(ReadAll(*Submit(Request("a", prompt, 1))).finished.usage.cached_prompt_tokens, 0);
  const auto stream = Submit(Request("b", prompt, 1));
  StreamUpdate update = stream->WaitAndTake();
  EXPECT_TRUE(update.admitted);
  EXPECT_EQ(update.cached_prompt_tokens, 8);
  while (!update.finished) update = stream->WaitAndTake();
  EXPECT_EQ(update.finished->usage.cached_prompt_tokens, 8);
  EXPECT_EQ(engine().stats().kv_blocks_cached, 2);
  engine().ResetPrefixCache();
  EXPECT_EQ(ReadAll(*Submit(Request("c", prompt, 1))).finished.usage.cached_prompt_tokens, 0);
  GenerateRequest salted = Request("d", prompt, 1);
  salted.cache_salt = "tenant";
  EXPECT_EQ(ReadAll(*Submit(salted)).finished.usage.cached_prompt_tokens, 0);
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
