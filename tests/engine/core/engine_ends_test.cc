// Pauses, drain, destruction and failures: how requests end when things go wrong.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/error_reason.h"
#include "engine/metrics.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "tests/engine/core/engine_fixture.h"

namespace flashquant {
namespace {

using EngineEndsTest = EngineTest;
using std::chrono::seconds;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::StrEq;

TEST_F(EngineEndsTest, AStreamThatIsNotReadIsPausedAndGoesOnAfterwards) {
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

TEST_F(EngineEndsTest, ACancelWakesAnEngineWhoseStreamsAreAllPaused) {
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

TEST_F(EngineEndsTest, ADeadlineIsSeenWhenTheStreamIsPaused) {
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

TEST_F(EngineEndsTest, ANonFiniteRowEndsOnlyItsRequest) {
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

TEST_F(EngineEndsTest, ADrainLetsAcceptedRequestsFinishAndRefusesNewOnes) {
  Start(SmallConfig());
  const auto stream = Submit(Request("a", {1}, 30));
  EXPECT_TRUE(engine().Drain(clock_.Now() + seconds(60)));
  EXPECT_EQ(engine().health(), EngineHealth::kDraining);
  const auto refused = engine().Submit(Request("b", {1}, 2));
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kUnavailable, StrEq("server is shutting down")));
  EXPECT_EQ(ReasonOf(refused.status()), "DRAINING");
  EXPECT_EQ(ReadAll(*stream).tokens.size(), 30u);
}

TEST_F(EngineEndsTest, ADrainEndsWhatIsLeftAtItsDeadline) {
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

TEST_F(EngineEndsTest, DestroyingTheEngineEndsWhatRuns) {
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
TEST_F(EngineEndsTest, AFailedStepEndsAllRequestsAndTheEngine) {
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

TEST_F(EngineEndsTest, AQueueTimeoutIsNoEndOfAGeneration) {
  prometheus::Registry registry;
  Metrics metrics(registry, "", 64);
  dependencies_.metrics = &metrics;
  const LateQueue queue = LetOneWaitTooLong();
  EXPECT_EQ(ReadAll(*queue.waiting).finished.error_reason, "QUEUE_TIMEOUT");
  FQ_EXPECT_OK(ReadAll(*queue.running).finished.status);
  ExpectIdle();
  double ended = 0;
  for (const prometheus::MetricFamily& family : registry.Collect()) {
    if (family.name != "flashquant_generations_finished_total") continue;
    for (const prometheus::ClientMetric& metric : family.metric) ended += metric.counter.value;
  }
  EXPECT_EQ(ended, 1);
}

}  // namespace
}  // namespace flashquant
