// One call between the engine's stream and its RPC: order of messages, one write in flight,
// gathering, pausing, and one end on every path. The sink and the clock are the test's.
#include "server/generate_session.h"

#include <chrono>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashquant {
namespace {

using ::testing::ElementsAre;
using namespace std::chrono_literals;

class FakeSink final : public CallSink {
 public:
  void Write(v1::GenerateResponse response) override {
    EXPECT_FALSE(ended) << "a write after the end";
    EXPECT_FALSE(in_flight) << "two writes in flight";
    in_flight = true;
    messages.push_back(std::move(response));
  }
  void WriteAndFinish(v1::GenerateResponse response) override {
    EXPECT_FALSE(ended) << "two ends";
    EXPECT_FALSE(in_flight);
    messages.push_back(std::move(response));
    ended = true;
  }
  void Finish(const RequestError& finish_error) override {
    EXPECT_FALSE(ended) << "two ends";
    ended = true;
    error = finish_error;
  }

  std::vector<v1::GenerateResponse> messages;
  bool in_flight = false;
  bool ended = false;
  std::optional<RequestError> error;
};

class GenerateSessionTest : public ::testing::Test {
 protected:
  GenerateSessionTest() {
    SessionSettings settings;
    settings.accepted.set_request_id("one");
    settings.output.token_ids = true;
    settings.arrival = now_;
    settings.slow_reader = 10s;
    session_ = std::make_shared<GenerateSession>(&sink_, std::move(settings));
    stream_ = std::make_shared<RequestStream>("one", session_);
    session_->SetStream(stream_);
  }
  ~GenerateSessionTest() override { session_->Abandon(); }

  // A call that gathers `tokens_per_message` tokens, admitted.
  void StartGathering(int32_t tokens_per_message) {
    SessionSettings settings;
    settings.output.token_ids = true;
    settings.output.tokens_per_message = tokens_per_message;
    settings.slow_reader = 10s;
    session_->Abandon();
    session_ = std::make_shared<GenerateSession>(&sink_, std::move(settings));
    stream_ = std::make_shared<RequestStream>("two", session_);
    session_->SetStream(stream_);
    stream_->PushAdmitted();
    Ready();
    WriteDone();
    sink_.messages.clear();
  }
  void Push(int32_t token) {
    stream_->PushToken(token, now_);
    Ready();
  }

  void Ready() { session_->OnStreamReady(stream_, now_); }
  void WriteDone(bool ok = true) {
    ASSERT_TRUE(sink_.in_flight);
    sink_.in_flight = false;
    session_->OnWriteDone(ok, now_);
  }
  static FinishedEvent Ended(absl::Status status = absl::OkStatus(), const char* why = "") {
    FinishedEvent event;
    event.status = std::move(status);
    event.error_reason = why;
    event.reason = FinishReason::kLength;
    return event;
  }
  std::vector<uint32_t> IdsOf(size_t message) {
    const auto& ids = sink_.messages.at(message).delta().token_ids();
    return {ids.begin(), ids.end()};
  }

  TimePoint now_{1000s};
  FakeSink sink_;
  std::shared_ptr<GenerateSession> session_;
  std::shared_ptr<RequestStream> stream_;
};

TEST_F(GenerateSessionTest, SendsAcceptedDeltasFinishedInThisOrder) {
  stream_->PushAdmitted();
  Ready();
  ASSERT_EQ(sink_.messages.size(), 1u);
  EXPECT_EQ(sink_.messages[0].accepted().request_id(), "one");
  WriteDone();
  stream_->PushToken(5, now_);
  Ready();
  EXPECT_THAT(IdsOf(1), ElementsAre(5u));
  WriteDone();
  stream_->PushLastToken(6, now_, Ended());
  Ready();
  EXPECT_THAT(IdsOf(2), ElementsAre(6u));
  EXPECT_EQ(sink_.messages[2].delta().first_index(), 1u);
  EXPECT_FALSE(sink_.ended);
  WriteDone();
  EXPECT_TRUE(sink_.ended);
  EXPECT_FALSE(sink_.error.has_value());
  EXPECT_EQ(sink_.messages.at(3).finished().reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_TRUE(session_->done());
}

TEST_F(GenerateSessionTest, NothingIsSentBeforeAdmission) {
  Ready();
  EXPECT_TRUE(sink_.messages.empty());
  stream_->PushFinished(Ended(absl::ResourceExhaustedError("x"), "QUEUE_TIMEOUT"));
  Ready();
  EXPECT_TRUE(sink_.messages.empty());
  ASSERT_TRUE(sink_.error.has_value());
  EXPECT_EQ(sink_.error->reason, "QUEUE_TIMEOUT");
}

TEST_F(GenerateSessionTest, TokensThatComeDuringAWriteAreGathered) {  // N6
  stream_->PushAdmitted();
  Ready();
  for (int i = 0; i < 5; ++i) {
    stream_->PushToken(i, now_);
    Ready();
  }
  EXPECT_EQ(sink_.messages.size(), 1u);
  EXPECT_EQ(stream_->pending_tokens(), 5);
  WriteDone();
  ASSERT_EQ(sink_.messages.size(), 2u);
  EXPECT_THAT(IdsOf(1), ElementsAre(0u, 1u, 2u, 3u, 4u));
}

TEST_F(GenerateSessionTest, TokensWaitForTheNumberThatTheClientAskedFor) {
  StartGathering(3);
  EXPECT_FALSE(session_->gather_due().has_value());
  Push(1);
  Push(2);
  EXPECT_TRUE(sink_.messages.empty());
  EXPECT_EQ(session_->gather_due(), now_ + GenerateSession::kGatherTime);
  Push(3);
  ASSERT_EQ(sink_.messages.size(), 1u);
  EXPECT_THAT(IdsOf(0), ElementsAre(1u, 2u, 3u));
  EXPECT_EQ(sink_.messages[0].delta().first_index(), 0u);
  EXPECT_FALSE(session_->gather_due().has_value());
  Push(4);  // while the write is in flight
  WriteDone();
  EXPECT_EQ(sink_.messages.size(), 1u);
  EXPECT_TRUE(session_->gather_due().has_value());
  Push(5);
  Push(6);
  EXPECT_THAT(IdsOf(1), ElementsAre(4u, 5u, 6u));
  EXPECT_EQ(sink_.messages[1].delta().first_index(), 3u);
}

TEST_F(GenerateSessionTest, ATokenWaitsForOthersNoLongerThanTheGatherTime) {
  StartGathering(100);
  Push(1);
  now_ += GenerateSession::kGatherTime - 1ms;
  Push(2);
  session_->OnGatherDue(now_);
  EXPECT_TRUE(sink_.messages.empty());
  now_ += 1ms;  // of the first; the second has waited for one
  session_->OnGatherDue(now_);
  ASSERT_EQ(sink_.messages.size(), 1u);
  EXPECT_THAT(IdsOf(0), ElementsAre(1u, 2u));
  EXPECT_FALSE(session_->gather_due().has_value());
}

TEST_F(GenerateSessionTest, TheTimeInTheStreamCounts) {
  StartGathering(100);
  stream_->PushToken(1, now_);
  now_ += GenerateSession::kGatherTime;
  Ready();
  EXPECT_EQ(sink_.messages.size(), 1u);
}

TEST_F(GenerateSessionTest, TheEndOfTheAnswerSendsWhatIsGathered) {
  StartGathering(100);
  Push(1);
  stream_->PushLastToken(2, now_, Ended());
  Ready();
  EXPECT_THAT(IdsOf(0), ElementsAre(1u, 2u));
  WriteDone();
  EXPECT_TRUE(sink_.ended);
  EXPECT_TRUE(sink_.messages.at(1).has_finished());
}

TEST_F(GenerateSessionTest, AnErrorComesAfterTheTokensThatWereGathered) {
  StartGathering(100);
  Push(1);
  stream_->PushFinished(Ended(absl::UnavailableError("x"), "DRAINING"));
  Ready();
  EXPECT_THAT(IdsOf(0), ElementsAre(1u));
  WriteDone();
  ASSERT_TRUE(sink_.error.has_value());
  EXPECT_EQ(sink_.error->reason, "DRAINING");
}

TEST_F(GenerateSessionTest, ASlowReaderGetsMoreThanItAskedForAtOnce) {
  StartGathering(2);
  Push(1);
  Push(2);
  for (int32_t token = 3; token < 12; ++token) Push(token);
  WriteDone();
  ASSERT_EQ(sink_.messages.size(), 2u);
  EXPECT_EQ(IdsOf(1).size(), 9u);
}

TEST_F(GenerateSessionTest, LogprobsComeWithTheirTokens) {
  SessionSettings settings;  // no ids, no text: logprobs alone make messages
  settings.slow_reader = 10s;
  session_->Abandon();
  session_ = std::make_shared<GenerateSession>(&sink_, std::move(settings));
  stream_ = std::make_shared<RequestStream>("two", session_);
  stream_->PushToken(5, now_,
                     OutputLogprobs{.chosen = {5, -1.25f}, .top = {{6, -0.5f}, {5, -1.25f}}});
  stream_->PushLastToken(7, now_, Ended(), OutputLogprobs{.chosen = {7, -2.0f}});
  Ready();
  const v1::Delta& delta = sink_.messages.at(0).delta();
  ASSERT_EQ(delta.logprobs_size(), 2);
  EXPECT_EQ(delta.logprobs(0).chosen().token_id(), 5u);
  EXPECT_EQ(delta.logprobs(0).chosen().logprob(), -1.25f);
  ASSERT_EQ(delta.logprobs(0).top_size(), 2);
  EXPECT_EQ(delta.logprobs(0).top(0).token_id(), 6u);
  EXPECT_EQ(delta.logprobs(1).chosen().logprob(), -2.0f);
  EXPECT_EQ(delta.logprobs(1).top_size(), 0);
  EXPECT_TRUE(delta.token_ids().empty());
}

TEST_F(GenerateSessionTest, ErrorComesAfterTheTokensBeforeIt) {
  stream_->PushAdmitted();
  Ready();
  stream_->PushToken(1, now_);
  stream_->PushFinished(Ended(absl::UnavailableError("x"), "DRAINING"));
  Ready();
  WriteDone();
  EXPECT_THAT(IdsOf(1), ElementsAre(1u));
  EXPECT_FALSE(sink_.ended);
  WriteDone();
  ASSERT_TRUE(sink_.error.has_value());
  EXPECT_EQ(sink_.error->message, "server is shutting down");
}

TEST_F(GenerateSessionTest, PausedReaderIsAbortedAfterTheLimit) {  // N5
  stream_->PushAdmitted();
  Ready();
  for (int i = 0; i < RequestStream::kMaxPendingTokens; ++i) stream_->PushToken(i, now_);
  session_->CheckSlowReader(now_);
  now_ += 9s;
  session_->CheckSlowReader(now_);
  EXPECT_FALSE(sink_.ended);
  now_ += 1s;
  session_->CheckSlowReader(now_);
  ASSERT_TRUE(sink_.error.has_value());
  EXPECT_EQ(sink_.error->code, absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(sink_.error->message, "client does not read");
  EXPECT_EQ(stream_->cancel_reason(), CancelReason::kSlowReader);
}

TEST_F(GenerateSessionTest, ReaderThatComesBackInTimeGoesOn) {
  stream_->PushAdmitted();
  Ready();
  for (int i = 0; i < RequestStream::kMaxPendingTokens; ++i) stream_->PushToken(i, now_);
  session_->CheckSlowReader(now_);
  now_ += 9s;
  WriteDone();
  now_ += 9s;
  session_->CheckSlowReader(now_);
  EXPECT_FALSE(sink_.ended);
  EXPECT_EQ(IdsOf(1).size(), static_cast<size_t>(RequestStream::kMaxPendingTokens));
}

TEST_F(GenerateSessionTest, EndedAnswerThatIsNotReadIsAborted) {
  stream_->PushAdmitted();
  Ready();
  stream_->PushLastToken(1, now_, Ended());
  now_ += 10s;
  session_->CheckSlowReader(now_);
  ASSERT_TRUE(sink_.error.has_value());
  EXPECT_EQ(sink_.error->reason, "SLOW_READER");
}

TEST_F(GenerateSessionTest, SlowButUnpausedReaderLosesNothing) {
  stream_->PushAdmitted();
  Ready();
  stream_->PushToken(1, now_);
  now_ += 10s;
  session_->CheckSlowReader(now_);  // looks whether the answer has ended
  EXPECT_FALSE(sink_.ended);
  stream_->PushLastToken(2, now_, Ended());
  WriteDone();
  EXPECT_THAT(IdsOf(1), ElementsAre(1u));
  WriteDone();
  EXPECT_THAT(IdsOf(2), ElementsAre(2u));
  WriteDone();
  EXPECT_TRUE(sink_.ended);
  EXPECT_FALSE(sink_.error.has_value());
}

TEST_F(GenerateSessionTest, EndBehindTokensThatMakeNoMessageIsDelivered) {
  SessionSettings settings;  // neither ids nor text: tokens make no message
  settings.slow_reader = 10s;
  session_->Abandon();
  session_ = std::make_shared<GenerateSession>(&sink_, std::move(settings));
  stream_ = std::make_shared<RequestStream>("two", session_);
  stream_->PushAdmitted();
  Ready();
  stream_->PushToken(1, now_);
  Ready();
  now_ += 10s;
  session_->CheckSlowReader(now_);  // takes the token
  stream_->PushLastToken(2, now_, Ended());
  Ready();  // the write is still in flight; no other note will come
  WriteDone();
  EXPECT_TRUE(sink_.ended);
  EXPECT_FALSE(sink_.error.has_value());
}

TEST_F(GenerateSessionTest, GivingUpAtOnceSparesReadersWhoseWriteIsUnderWay) {
  SessionSettings settings;
  settings.output.token_ids = true;
  settings.slow_reader = 0s;
  session_->Abandon();
  session_ = std::make_shared<GenerateSession>(&sink_, std::move(settings));
  stream_ = std::make_shared<RequestStream>("two", session_);
  stream_->PushAdmitted();
  Ready();
  stream_->PushLastToken(1, now_, Ended());
  now_ += 1ms;
  session_->CheckSlowReader(now_);
  EXPECT_FALSE(sink_.ended);
  now_ += 1s;
  session_->CheckSlowReader(now_);
  ASSERT_TRUE(sink_.error.has_value());
  EXPECT_EQ(sink_.error->reason, "SLOW_READER");
}

TEST_F(GenerateSessionTest, FailedWriteCancelsAndEndsOnce) {  // N1, N2
  stream_->PushAdmitted();
  Ready();
  WriteDone(/*ok=*/false);
  EXPECT_EQ(stream_->cancel_reason(), CancelReason::kClient);
  EXPECT_FALSE(sink_.ended) << "the engine has not let go yet";
  stream_->PushFinished(Ended(absl::CancelledError("x"), "CANCELLED"));
  Ready();
  ASSERT_TRUE(sink_.error.has_value());
  EXPECT_EQ(sink_.error->code, absl::StatusCode::kCancelled);
  EXPECT_EQ(sink_.messages.size(), 1u);
}

// Found by fuzzing (tests/fuzz/server_fuzz.cc): such a call never ended.
TEST_F(GenerateSessionTest, FailedWriteWithMessagesBehindItEndsTheCall) {
  stream_->PushAdmitted();
  stream_->PushToken(5, now_);
  Ready();  // Accepted is in flight, a Delta waits
  stream_->PushFinished(Ended());
  Ready();  // not looked at during the write
  WriteDone(false);
  EXPECT_TRUE(sink_.ended);
  ASSERT_TRUE(sink_.error.has_value());
  EXPECT_EQ(sink_.error->reason, "CANCELLED");
}

TEST_F(GenerateSessionTest, FailedWriteAfterTheEndOfTheAnswerEndsTheCall) {
  stream_->PushAdmitted();
  stream_->PushLastToken(1, now_, Ended());
  Ready();
  WriteDone(/*ok=*/false);
  ASSERT_TRUE(sink_.error.has_value());
  EXPECT_EQ(sink_.error->reason, "CANCELLED");
}

TEST_F(GenerateSessionTest, CancelBeforeTheEngineHasTheRequestIsKept) {
  auto session = std::make_shared<GenerateSession>(&sink_, SessionSettings());
  session->Cancel(CancelReason::kDeadline);
  auto stream = std::make_shared<RequestStream>("two", session);
  session->SetStream(stream);
  EXPECT_EQ(stream->cancel_reason(), CancelReason::kDeadline);
}

}  // namespace
}  // namespace flashquant
