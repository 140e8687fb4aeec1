// The two queues between the engine thread and the others: nothing lost, nothing twice.
#include "engine/request_stream.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/error_reason.h"
#include "engine/request_inbox.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::ElementsAre;
using testing::StrEq;

class CountingBell final : public EngineBell {
 public:
  void Ring() override { rings_.fetch_add(1); }
  int rings() const { return rings_.load(); }

 private:
  std::atomic<int> rings_{0};
};

AcceptedRequest Accepted(const std::string& id) {
  AcceptedRequest accepted;
  accepted.request.request_id = id;
  accepted.request.prompt_tokens = {1};
  accepted.stream = std::make_shared<RequestStream>(id);
  return accepted;
}

TEST(RequestStreamTest, TakeGivesEverythingSinceTheLastTake) {
  RequestStream stream("a");
  EXPECT_TRUE(stream.Take().empty());
  stream.PushAdmitted();
  stream.PushToken(3, TimePoint{});
  stream.PushToken(4, TimePoint{});
  EXPECT_EQ(stream.pending_tokens(), 2);
  const StreamUpdate update = stream.Take();
  EXPECT_TRUE(update.admitted);
  EXPECT_THAT(update.token_ids, ElementsAre(3, 4));
  EXPECT_EQ(update.token_times.size(), 2u);
  EXPECT_EQ(stream.pending_tokens(), 0);
  EXPECT_FALSE(stream.Take().admitted);
}

TEST(RequestStreamTest, LogprobsComeWithTheirTokens) {
  RequestStream stream("a");
  stream.PushToken(3, TimePoint{}, OutputLogprobs{.chosen = {3, -1.5f}, .top = {{4, -0.5f}}});
  stream.PushToken(4, TimePoint{}, OutputLogprobs{.chosen = {4, -2.5f}});
  const StreamUpdate update = stream.Take();
  ASSERT_EQ(update.logprobs.size(), 2u);
  EXPECT_EQ(update.logprobs[0].chosen.token_id, 3);
  EXPECT_EQ(update.logprobs[0].top.at(0).logprob, -0.5f);
  EXPECT_EQ(update.logprobs[1].chosen.logprob, -2.5f);
  stream.PushLastToken(9, TimePoint{}, FinishedEvent{}, OutputLogprobs{.chosen = {9, -3.0f}});
  EXPECT_EQ(stream.Take().logprobs.at(0).chosen.token_id, 9);
}

TEST(RequestStreamTest, TheLastTokenAndTheEndComeInOneUpdate) {
  RequestStream stream("a");
  stream.PushLastToken(9, TimePoint{}, FinishedEvent{});
  const StreamUpdate update = stream.Take();
  EXPECT_THAT(update.token_ids, ElementsAre(9));
  EXPECT_TRUE(update.finished.has_value());
}

TEST(RequestStreamTest, TheFirstCancelReasonStaysAndRingsOnce) {
  const auto bell = std::make_shared<CountingBell>();
  RequestStream stream("a", nullptr, bell);
  EXPECT_EQ(stream.cancel_reason(), std::nullopt);
  stream.Cancel(CancelReason::kDeadline);
  stream.Cancel(CancelReason::kClient);
  EXPECT_EQ(stream.cancel_reason(), CancelReason::kDeadline);
  EXPECT_EQ(bell->rings(), 1);
}

TEST(RequestStreamTest, TakingFromAFullStreamWakesTheEngine) {
  const auto bell = std::make_shared<CountingBell>();
  RequestStream stream("a", nullptr, bell);
  stream.PushToken(1, TimePoint{});
  stream.Take();
  EXPECT_EQ(bell->rings(), 0);
  for (int i = 0; i < RequestStream::kMaxPendingTokens; ++i) stream.PushToken(i, TimePoint{});
  stream.Take();
  EXPECT_EQ(bell->rings(), 1);
}

TEST(RequestStreamTest, AConsumerThreadSeesEveryTokenInOrder) {
  constexpr int kNumTokens = 20000;
  RequestStream stream("a");
  std::vector<int32_t> seen;
  std::thread consumer([&] {
    while (true) {
      const StreamUpdate update = stream.WaitAndTake();
      seen.insert(seen.end(), update.token_ids.begin(), update.token_ids.end());
      if (update.finished) return;
    }
  });
  for (int i = 0; i + 1 < kNumTokens; ++i) stream.PushToken(i, TimePoint{});
  stream.PushLastToken(kNumTokens - 1, TimePoint{}, FinishedEvent{});
  consumer.join();
  ASSERT_EQ(seen.size(), static_cast<size_t>(kNumTokens));
  for (int i = 0; i < kNumTokens; ++i) EXPECT_EQ(seen[static_cast<size_t>(i)], i);
}

TEST(RequestInboxTest, IsFullUntilARequestLeavesTheQueue) {
  RequestInbox inbox(2);
  FQ_EXPECT_OK(inbox.Push(Accepted("a")));
  FQ_EXPECT_OK(inbox.Push(Accepted("b")));
  EXPECT_THAT(inbox.Push(Accepted("c")),
              StatusIs(absl::StatusCode::kResourceExhausted, StrEq("queue full (limit 2)")));
  EXPECT_EQ(inbox.Take().size(), 2u);  // taken, but still waiting to be scheduled
  EXPECT_EQ(ReasonOf(inbox.Push(Accepted("c"))), "QUEUE_FULL");
  inbox.LeftQueue();
  FQ_EXPECT_OK(inbox.Push(Accepted("c")));
}

TEST(RequestInboxTest, AnIdIsTakenUntilItIsForgotten) {
  RequestInbox inbox(9);
  FQ_EXPECT_OK(inbox.Push(Accepted("a")));
  EXPECT_EQ(inbox.Push(Accepted("a")).code(), absl::StatusCode::kAlreadyExists);
  inbox.Forget("a");
  FQ_EXPECT_OK(inbox.Push(Accepted("a")));
}

TEST(RequestInboxTest, AClosedInboxGivesTheFirstReason) {
  RequestInbox inbox(9);
  FQ_EXPECT_OK(inbox.Push(Accepted("a")));
  inbox.Close(absl::UnavailableError("first"));
  inbox.Close(absl::UnavailableError("second"));
  EXPECT_THAT(inbox.Push(Accepted("b")), StatusIs(absl::StatusCode::kUnavailable, StrEq("first")));
  EXPECT_EQ(inbox.Take().size(), 1u);  // what was taken before is still there
}

TEST(RequestInboxTest, ARingBeforeTheWaitIsNotLost) {
  RequestInbox inbox(9);
  inbox.Ring();
  inbox.Wait(std::nullopt);  // hangs if it is
  inbox.Take();
  FQ_EXPECT_OK(inbox.Push(Accepted("a")));
  inbox.Wait(std::nullopt);
}

TEST(RequestInboxTest, AWaitEndsWithItsTimeout) {
  RequestInbox inbox(9);
  inbox.Wait(std::chrono::milliseconds(1));
  inbox.Wait(Duration::min());
  EXPECT_TRUE(inbox.WaitUntilAllEnded(Duration::max()));
  FQ_EXPECT_OK(inbox.Push(Accepted("a")));
  EXPECT_FALSE(inbox.WaitUntilAllEnded(std::chrono::milliseconds(1)));
  inbox.Ended();
  EXPECT_TRUE(inbox.WaitUntilAllEnded(std::nullopt));
}

TEST(RequestInboxTest, ManyProducersLoseNothing) {
  constexpr int kNumProducers = 4;
  constexpr int kPerProducer = 500;
  RequestInbox inbox(kNumProducers * kPerProducer);
  std::vector<std::thread> producers;
  for (int p = 0; p < kNumProducers; ++p) {
    producers.emplace_back([&inbox, p] {
      for (int i = 0; i < kPerProducer; ++i) {
        EXPECT_TRUE(inbox.Push(Accepted(std::to_string(p * kPerProducer + i))).ok());
      }
    });
  }
  size_t taken = 0;
  while (taken < static_cast<size_t>(kNumProducers * kPerProducer)) {
    inbox.Wait(std::nullopt);
    for (const AcceptedRequest& accepted : inbox.Take()) {
      inbox.LeftQueue();
      inbox.Forget(accepted.request.request_id);
      inbox.Ended();
      ++taken;
    }
  }
  for (std::thread& producer : producers) producer.join();
  EXPECT_TRUE(inbox.WaitUntilAllEnded(Duration::zero()));
}

}  // namespace
}  // namespace flashquant
