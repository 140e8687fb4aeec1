// The service over a real connection: streams, endings, refusals. Each test ends with the leak
// check. Ids in comments are rows of the reliability matrix.
#include <chrono>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/test_server.h"

namespace flashquant {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using namespace std::chrono_literals;

constexpr int kOk = 0, kCancelled = 1, kInvalidArgument = 3, kDeadlineExceeded = 4,
              kAlreadyExists = 6, kResourceExhausted = 8, kUnimplemented = 12, kInternal = 13,
              kUnavailable = 14;

class RpcTest : public ::testing::Test {
 protected:
  TestServer& Start(TestServerOptions options = {}) {
    server_ = std::make_unique<TestServer>(std::move(options));
    return *server_;
  }
  void TearDown() override {
    if (server_ == nullptr) return;
    server_->runner().OpenGate();
    EXPECT_EQ(server_->LeakCheck(), "");
  }
  std::vector<int32_t> Expected(const std::string& text, uint64_t seed, int count) {
    return server_->model().Answer(server_->tokenizer().Encode(text, SpecialText::kPlain), seed,
                                   count);
  }
  std::string TextOf(const std::vector<int32_t>& ids) {
    std::string text;
    for (const int32_t id : ids) {
      // Bytes from 128 on would not be text; seeds below are chosen without them.
      EXPECT_FALSE(id >= 128 && id < 256) << "choose another seed";
      if (!server_->tokenizer().IsSpecial(id)) text += server_->tokenizer().TokenBytes(id);
    }
    return text;
  }
  // A seed for which the answer has only ids whose text is valid by itself.
  uint64_t TextSeed(const std::string& text, int count) {
    for (uint64_t seed = 1;; ++seed) {
      const std::vector<int32_t> ids = Expected(text, seed, count);
      if (std::none_of(ids.begin(), ids.end(), [](int32_t id) { return id < 256 || id == 999; })) {
        return seed;
      }
    }
  }
  bool RunningIs(int64_t count) {
    return Eventually([&] { return server_->engine().stats().requests_running == count; });
  }

  std::unique_ptr<TestServer> server_;
};

TEST_F(RpcTest, StreamIsAcceptedThenDeltasThenFinished) {
  Start();
  const uint64_t seed = TextSeed("hello", 20);
  const Answer answer = server_->Generate(TextRequest("hello", 20, seed));
  ASSERT_TRUE(answer.result.ok()) << answer.result.message;
  EXPECT_TRUE(answer.in_order);
  EXPECT_EQ(answer.num_accepted, 1);
  EXPECT_EQ(answer.num_finished, 1);
  EXPECT_EQ(answer.accepted.model(), "fake");
  EXPECT_EQ(answer.accepted.prompt_tokens(), 5u);
  EXPECT_EQ(answer.accepted.max_output_tokens(), 20u);
  EXPECT_EQ(answer.accepted.seed(), seed);
  EXPECT_EQ(answer.ids, Expected("hello", seed, 20));
  EXPECT_EQ(answer.text, TextOf(answer.ids));
  EXPECT_EQ(answer.finished.reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(answer.finished.usage().output_tokens(), 20u);
  EXPECT_EQ(answer.finished.usage().prompt_tokens(), 5u);
}

TEST_F(RpcTest, DrawnSeedRepeatsTheAnswer) {  // R26
  Start();
  v1::GenerateRequest request = TextRequest("x", 8);
  request.mutable_sampling()->clear_seed();
  const Answer first = server_->Generate(request);
  request.mutable_sampling()->set_seed(first.accepted.seed());
  EXPECT_EQ(server_->Generate(request).ids, first.ids);
}

TEST_F(RpcTest, UnsetLimitRunsToTheEndOfTheContext) {  // R12
  TestServerOptions options;
  options.engine.context_length = 40;
  Start(options);
  v1::GenerateRequest request = TextRequest("0123456789", 1);
  request.mutable_stop()->clear_max_output_tokens();
  const Answer answer = server_->Generate(request);
  EXPECT_EQ(answer.finished.reason(), v1::FINISH_REASON_CONTEXT_LENGTH);
  EXPECT_EQ(answer.ids.size(), 30u);
}

TEST_F(RpcTest, StopSequenceCutsTheTextAndIsNamed) {  // T4
  Start();
  const uint64_t seed = TextSeed("story", 12);
  const std::vector<int32_t> ids = Expected("story", seed, 12);
  const std::string text = TextOf(ids);
  // From the middle of one token's text into the next one's.
  const size_t at = TextOf({ids.begin(), ids.begin() + 6}).size() - 2;
  const std::string stop = text.substr(at, 4);
  ASSERT_EQ(text.find(stop), at);
  v1::GenerateRequest request = TextRequest("story", 12, seed);
  request.mutable_stop()->add_sequences("never there");
  request.mutable_stop()->add_sequences(stop);
  Answer answer = server_->Generate(request);
  EXPECT_EQ(answer.text, text.substr(0, at));
  EXPECT_EQ(answer.finished.reason(), v1::FINISH_REASON_STOP_SEQUENCE);
  EXPECT_EQ(answer.finished.sequence(), stop);
  request.mutable_stop()->set_include_stop(true);  // T9
  answer = server_->Generate(request);
  EXPECT_EQ(answer.text, text.substr(0, at + 4));
}

TEST_F(RpcTest, StopTokenEndsTheAnswer) {
  Start();
  const std::vector<int32_t> ids = Expected("story", 3, 12);
  v1::GenerateRequest request = TextRequest("story", 12, 3);
  request.mutable_stop()->add_token_ids(static_cast<uint32_t>(ids[4]));
  const Answer answer = server_->Generate(request);
  EXPECT_EQ(answer.finished.reason(), v1::FINISH_REASON_STOP_TOKEN);
  EXPECT_EQ(answer.finished.token_id(), static_cast<uint32_t>(ids[4]));
  EXPECT_EQ(answer.ids.size(), answer.finished.usage().output_tokens());
}

TEST_F(RpcTest, RunningRequestIdIsRefusedAndFreeAfterwards) {  // R31, R32
  Start();
  server_->runner().CloseGate();
  v1::GenerateRequest request = TextRequest("first", 4);
  request.set_request_id("mine");
  std::future<Answer> first = server_->GenerateAsync(request);
  server_->runner().WaitUntilAtGate();
  const Answer second = server_->Generate(request);
  EXPECT_EQ(second.result.code, kAlreadyExists);
  EXPECT_EQ(second.result.reason, "DUPLICATE_REQUEST_ID");
  EXPECT_EQ(second.result.metadata.at("field"), "request_id");
  server_->runner().OpenGate();
  EXPECT_EQ(first.get().ids, Expected("first", 1, 4));
  EXPECT_TRUE(server_->Generate(request).result.ok());
}

TEST_F(RpcTest, RefusalsNameEveryField) {
  Start();
  v1::GenerateRequest request = TextRequest("x", 4);
  request.mutable_sampling()->set_temperature(-1);
  request.mutable_sampling()->set_top_p(0);
  const Answer answer = server_->Generate(request);
  EXPECT_EQ(answer.result.code, kInvalidArgument);
  EXPECT_EQ(answer.result.reason, "PARAMETER_OUT_OF_RANGE");
  EXPECT_EQ(answer.result.metadata.at("field"), "sampling.temperature");
  EXPECT_THAT(answer.result.violations,
              UnorderedElementsAre("sampling.temperature: must be within 0 and 2",
                                   "sampling.top_p: must be above 0 and at most 1"));
  EXPECT_EQ(answer.num_accepted, 0);
}

TEST_F(RpcTest, RequestThatCanNeverFitIsRefusedAndTheNextIsServed) {  // R13
  TestServerOptions options;
  options.engine.num_blocks = 9;
  Start(options);
  const Answer answer = server_->Generate(TextRequest("x", 500));
  EXPECT_EQ(answer.result.code, kInvalidArgument);
  EXPECT_EQ(answer.result.reason, "KV_CAPACITY_EXCEEDED");
  EXPECT_EQ(answer.result.message, "request needs 32 KV blocks, 8 exist");
  EXPECT_EQ(answer.result.metadata.at("limit"), "8");
  EXPECT_EQ(answer.result.metadata.at("got"), "32");
  EXPECT_THAT(answer.result.violations, ::testing::SizeIs(1));
  EXPECT_TRUE(server_->Generate(TextRequest("x", 4)).result.ok());
}

TEST_F(RpcTest, FullQueueIsRefusedWithARetryTime) {  // S1
  TestServerOptions options;
  options.engine.max_sequences = 1;
  options.engine.max_waiting = 2;
  Start(options);
  server_->runner().CloseGate();
  std::vector<std::future<Answer>> waiting;
  waiting.push_back(server_->GenerateAsync(TextRequest("a", 2)));
  server_->runner().WaitUntilAtGate();
  Answer refused;
  for (int i = 0; i < 20 && refused.result.ok(); ++i) {
    // Each either waits in the queue until the gate opens, or is refused at once.
    std::future<Answer> next = server_->GenerateAsync(TextRequest("b", 2));
    if (next.wait_for(200ms) == std::future_status::ready) {
      refused = next.get();
    } else {
      waiting.push_back(std::move(next));
    }
  }
  EXPECT_EQ(refused.result.code, kResourceExhausted);
  EXPECT_EQ(refused.result.reason, "QUEUE_FULL");
  EXPECT_EQ(refused.result.message, "queue full (limit 2)");
  EXPECT_EQ(refused.result.metadata.at("limit"), "2");
  EXPECT_TRUE(refused.result.retry_seconds.has_value());
  server_->runner().OpenGate();
  for (std::future<Answer>& answer : waiting) EXPECT_TRUE(answer.get().result.ok());
}

TEST_F(RpcTest, QueueTimeoutEndsAWaitingRequest) {  // S2
  TestServerOptions options;
  options.engine.max_sequences = 1;
  Start(options);
  // A long answer keeps the only place: with steps of a millisecond it cannot end before the late
  // request has waited long enough.
  server_->runner().OnLaunch([](const StepPlan&) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
    while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
  });
  std::future<Answer> running = server_->GenerateAsync(TextRequest("long", 1000));
  ASSERT_TRUE(RunningIs(1));
  v1::GenerateRequest request = TextRequest("late", 4);
  request.mutable_queue_timeout()->set_nanos(1000000);
  std::future<Answer> late = server_->GenerateAsync(request);
  const Answer answer = late.get();
  EXPECT_EQ(answer.result.code, kResourceExhausted);
  EXPECT_EQ(answer.result.reason, "QUEUE_TIMEOUT");
  EXPECT_EQ(answer.num_accepted, 0);
  EXPECT_TRUE(running.get().result.ok());
}

TEST_F(RpcTest, CancelInDecodeFreesEverything) {  // N1
  Start();
  InferenceClient client(server_->target());
  int deltas = 0;
  const CallResult result = client.Generate(
      TextRequest("x", 2000),
      [&](const v1::GenerateResponse& response) { return !response.has_delta() || ++deltas < 3; });
  EXPECT_EQ(result.code, kCancelled);
  EXPECT_EQ(server_->LeakCheck(), "");
  const Exposition metrics = server_->Scrape();
  EXPECT_EQ(metrics.Sum("flashquant_requests_finished_total", {{"code", "CANCELLED"}}), 1);
  EXPECT_EQ(metrics.Sum("flashquant_stream_aborts_total", {{"reason", "client_cancel"}}), 1);
}

TEST_F(RpcTest, CancelBeforeAcceptedFreesEverything) {  // N1
  TestServerOptions options;
  options.engine.max_sequences = 1;
  Start(options);
  server_->runner().CloseGate();
  std::future<Answer> running = server_->GenerateAsync(TextRequest("long", 20));
  server_->runner().WaitUntilAtGate();
  // Waits in the queue until its client gives up; a deadline is the client's way to cancel here.
  const Answer queued = server_->Generate(TextRequest("queued", 20), {.timeout = 50ms});
  EXPECT_EQ(queued.result.code, kDeadlineExceeded);
  EXPECT_EQ(queued.num_accepted, 0);
  server_->runner().OpenGate();
  EXPECT_TRUE(running.get().result.ok());
}

TEST_F(RpcTest, DeadlineInDecodeEndsTheRequest) {  // N3
  Start();
  for (int i = 0; i < 3; ++i) {
    server_->runner().CloseGate();
    const Answer answer = server_->Generate(TextRequest("x", 2000), {.timeout = 500ms});
    EXPECT_EQ(answer.result.code, kDeadlineExceeded);
    server_->runner().OpenGate();
  }
  EXPECT_EQ(server_->LeakCheck(), "");
  // The server sees the deadline later by the request's way to it; on a busy machine that can be
  // more than it allows for, and the client's cancel at its own deadline is a plain one.
  const Exposition metrics = server_->Scrape();
  const double deadlines = metrics.Sum("flashquant_stream_aborts_total", {{"reason", "deadline"}});
  EXPECT_GE(deadlines, 1);
  EXPECT_EQ(metrics.Sum("flashquant_stream_aborts_total"), 3);
  EXPECT_EQ(metrics.Sum("flashquant_requests_finished_total", {{"code", "DEADLINE_EXCEEDED"}}),
            deadlines);
}

TEST_F(RpcTest, DeadlineThatHasPassedIsNeverScheduled) {  // N3
  Start();
  for (int i = 0; i < 20; ++i) {
    const Answer answer = server_->Generate(TextRequest("x", 5), {.timeout = 0ms});
    EXPECT_EQ(answer.result.code, kDeadlineExceeded);
  }
  EXPECT_EQ(server_->LeakCheck(), "");
  EXPECT_EQ(server_->engine().stats().steps, 0);
}

TEST_F(RpcTest, ServerMaximumEndsACallWithoutADeadline) {  // N4
  TestServerOptions options;
  options.max_request_duration = 50ms;
  Start(options);
  server_->runner().CloseGate();
  std::future<Answer> answer = server_->GenerateAsync(TextRequest("x", 100));
  server_->runner().WaitUntilAtGate();
  const TimePoint after = std::chrono::steady_clock::now() + 60ms;
  Eventually([&] { return std::chrono::steady_clock::now() >= after; });
  server_->runner().OpenGate();
  const Answer ended = answer.get();
  EXPECT_EQ(ended.result.code, kDeadlineExceeded);
  EXPECT_EQ(ended.result.message, "deadline has passed");
}

TEST_F(RpcTest, ReaderThatStopsIsAbortedAndOthersGoOn) {  // N5
  TestServerOptions options;
  options.server.slow_reader = 300ms;
  // Ten kilobytes per token: transport windows take megabytes before a write has to wait.
  options.text_repeat = 2000;
  Start(options);
  InferenceClient client(server_->target());
  Mutex mu;
  CondVar changed;
  bool resume = false;
  v1::GenerateRequest request = TextRequest("stalled", 1500);
  request.mutable_output()->set_top_logprobs(2);
  std::future<CallResult> stalled = std::async(std::launch::async, [&] {
    return client.Generate(request, [&](const v1::GenerateResponse& response) {
      if (!response.has_delta()) return true;
      MutexLock lock(&mu);
      while (!resume) changed.Wait(&mu);
      return true;
    });
  });
  EXPECT_TRUE(Eventually([&] {
    return server_->Scrape().Sum("flashquant_stream_aborts_total", {{"reason", "slow_reader"}}) ==
           1;
  }));
  // Its KV blocks are free although the client still has not read anything.
  EXPECT_TRUE(Eventually([&] { return server_->engine().stats().kv_blocks_used == 0; }));
  EXPECT_TRUE(server_->Generate(TextRequest("reader", 50)).result.ok());
  {
    MutexLock lock(&mu);
    resume = true;
    changed.NotifyAll();
  }
  const CallResult result = stalled.get();
  EXPECT_EQ(result.code, kResourceExhausted);
  EXPECT_EQ(result.reason, "SLOW_READER");
  EXPECT_EQ(result.message, "client does not read");
}

TEST_F(RpcTest, NonFiniteLogitsFailThatRequestOnly) {  // T12
  TestServerOptions options;
  Start(options);
  server_->runner().SetNonFinite([&](const SequenceStep& step) {
    return step.sampling->seed == 666 && step.output_position == 2;
  });
  const Answer bad = server_->Generate(TextRequest("bad", 10, 666));
  EXPECT_EQ(bad.result.code, kInternal);
  EXPECT_EQ(bad.result.reason, "NON_FINITE_LOGITS");
  EXPECT_EQ(bad.result.message, "model produced non-finite values");
  EXPECT_EQ(server_->Generate(TextRequest("good", 10, 2)).ids, Expected("good", 2, 10));
}

TEST_F(RpcTest, EngineFailureEndsCallsAsUnavailable) {  // G4
  Start();
  server_->runner().FailLaunch(3);
  const Answer answer = server_->Generate(TextRequest("x", 10));
  EXPECT_EQ(answer.result.code, kUnavailable);
  EXPECT_EQ(answer.result.reason, "ENGINE_FAILED");
  EXPECT_EQ(answer.result.message, "engine failed");
  EXPECT_TRUE(Eventually([&] { return server_->engine_failed(); }));
  EXPECT_EQ(server_->Generate(TextRequest("x", 10)).result.reason, "ENGINE_FAILED");
  server_.reset();  // a failed engine keeps its blocks: no leak check
}

TEST_F(RpcTest, GenerateTextGathersTheStream) {
  Start();
  InferenceClient client(server_->target());
  const uint64_t seed = TextSeed("all", 9);
  v1::GenerateTextRequest request;
  *request.mutable_request() = TextRequest("all", 9, seed);
  v1::GenerateTextResponse response;
  const CallResult result = client.GenerateText(request, &response);
  ASSERT_TRUE(result.ok()) << result.message;
  const std::vector<int32_t> ids(response.token_ids().begin(), response.token_ids().end());
  EXPECT_EQ(ids, Expected("all", seed, 9));
  EXPECT_EQ(response.text(), TextOf(ids));
  EXPECT_EQ(response.accepted().prompt_tokens(), 3u);
  EXPECT_EQ(response.finished().reason(), v1::FINISH_REASON_LENGTH);
  request.mutable_request()->mutable_sampling()->set_top_p(3);
  EXPECT_EQ(client.GenerateText(request, &response).code, kInvalidArgument);
}

TEST_F(RpcTest, TokenizeAndDetokenizeAreInverse) {  // R41
  Start();
  InferenceClient client(server_->target());
  v1::TokenizeRequest text;
  text.set_text("caf\xC3\xA9 \xF0\x9F\x98\x80");
  v1::TokenizeResponse ids;
  ASSERT_TRUE(client.Tokenize(text, &ids).ok());
  v1::DetokenizeRequest back;
  *back.mutable_token_ids() = ids.token_ids();
  v1::DetokenizeResponse joined;
  ASSERT_TRUE(client.Detokenize(back, &joined).ok());
  EXPECT_EQ(joined.text(), text.text());
  back.add_token_ids(1000);
  const CallResult refused = client.Detokenize(back, &joined);
  EXPECT_EQ(refused.code, kInvalidArgument);
  EXPECT_EQ(refused.reason, "TOKEN_ID_OUT_OF_RANGE");
}

}  // namespace
}  // namespace flashquant
