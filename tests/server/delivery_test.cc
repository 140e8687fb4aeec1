// The delivery thread when memory runs short: every call ends exactly once, one for which there is
// none ends alone with INTERNAL_ERROR, and nothing is left behind. The sinks and the clock are the
// test's.
#include "server/delivery_thread.h"

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "tests/support/failing_allocations.h"

namespace flashquant {
namespace {

constexpr int kNumCalls = 4;
constexpr int kNumTokens = 6;

// A client that reads at once.
class Call final : public CallSink {
 public:
  explicit Call(DeliveryThread* delivery) : delivery_(delivery) {}

  void Start(const std::string& request_id) {
    SessionSettings settings;
    settings.accepted.set_request_id(request_id);
    settings.output.token_ids = true;
    settings.slow_reader = std::chrono::hours(1);
    session_ = std::make_shared<GenerateSession>(this, std::move(settings));
    stream_ = std::make_shared<RequestStream>(request_id, session_);
    session_->SetStream(stream_);
    delivery_->Register(session_);
  }
  void PushAnswer(bool fails) {
    OutputLogprobs logprobs = {.chosen = {.token_id = 0, .logprob = -1.0f},
                               .top = {{.token_id = 0, .logprob = -1.0f}}};
    stream_->PushAdmitted();
    delivery_->OnStreamReady(stream_);
    for (int32_t i = 0; i < kNumTokens; ++i) {
      stream_->PushToken(i, TimePoint{}, logprobs);
      delivery_->OnStreamReady(stream_);
    }
    FinishedEvent event;
    event.reason = FinishReason::kLength;
    if (fails) {
      event.status = absl::UnavailableError("engine failed");
      event.error_reason = "ENGINE_FAILED";
    }
    stream_->PushFinished(std::move(event));
    delivery_->OnStreamReady(stream_);
  }

  // As gRPC's, these may find no memory before anything is sent.
  void Write(v1::GenerateResponse response) override {
    const std::string bytes = response.SerializeAsString();
    {
      MutexLock lock(&mu_);
      EXPECT_FALSE(ended_) << "a write after the end";
      for (const uint32_t id : response.delta().token_ids()) {
        EXPECT_EQ(static_cast<int>(id), num_tokens_++);
      }
    }
    delivery_->OnWriteDone(session_, true);
  }
  void WriteAndFinish(v1::GenerateResponse response) override {
    const std::string bytes = response.SerializeAsString();
    End("");
  }
  void Finish(const RequestError& error) override {
    const std::string text = error.message + " of some length, as details have it";
    End(error.reason);
  }

  // How it ended; "" = well.
  std::string WaitForEnd() {
    MutexLock lock(&mu_);
    while (!ended_) changed_.Wait(&mu_);
    return reason_;
  }
  bool complete() {
    MutexLock lock(&mu_);
    return num_tokens_ == kNumTokens;
  }
  bool cancelled() const { return stream_->cancel_reason().has_value(); }

 private:
  void End(std::string reason) {
    MutexLock lock(&mu_);
    EXPECT_FALSE(ended_) << "two ends";
    ended_ = true;
    reason_ = std::move(reason);
    changed_.NotifyAll();
  }

  DeliveryThread* const delivery_;
  std::shared_ptr<GenerateSession> session_;
  std::shared_ptr<RequestStream> stream_;
  Mutex mu_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  int num_tokens_ ABSL_GUARDED_BY(mu_) = 0;
  std::string reason_ ABSL_GUARDED_BY(mu_);
};

// The number of calls that ended for want of memory. The last call is one that the engine fails.
int RunCalls(Fault delivery_fault) {
  allocation_failed.store(false);
  int num_broken = 0;
  ThreadStartClock clock(delivery_fault);
  DeliveryThread delivery(&clock, std::chrono::hours(1));
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < kNumCalls; ++i) {
    calls.push_back(std::make_unique<Call>(&delivery));
    calls.back()->Start(fmt::format("call number {}", i));
    if (i > 0) calls.back()->PushAnswer(i == kNumCalls - 1);
  }
  clock.Start();
  for (int i = 1; i < kNumCalls; ++i) {
    const std::string reason = calls[static_cast<size_t>(i)]->WaitForEnd();
    if (reason == "INTERNAL_ERROR") {
      ++num_broken;
      EXPECT_TRUE(calls[static_cast<size_t>(i)]->cancelled());
      continue;
    }
    EXPECT_EQ(reason, i == kNumCalls - 1 ? "ENGINE_FAILED" : "");
    EXPECT_TRUE(calls[static_cast<size_t>(i)]->complete());
  }
  // The first never hears of its engine.
  delivery.EndAll(reason::kEngineFailed);
  const std::string reason = calls.front()->WaitForEnd();
  EXPECT_TRUE(reason == "ENGINE_FAILED" || reason == "INTERNAL_ERROR") << reason;
  return num_broken + (reason == "INTERNAL_ERROR" ? 1 : 0);
}

// S7: messages
TEST(DeliveryTest, ACallThatFindsNoMemoryEndsAlone) {
  EXPECT_EQ(RunCalls(Fault{}), 0);
  int num_broken = 0;
  for (int64_t n = 0; !testing::Test::HasFailure(); ++n) {
    SCOPED_TRACE(fmt::format("allocation {}", n));
    const int64_t living = num_living_allocations.load();
    const int broken = RunCalls({.left = n});
    EXPECT_EQ(num_living_allocations.load(), living);
    EXPECT_LE(broken, 1);
    num_broken += broken;
    if (!allocation_failed.load()) break;  // the whole run needs fewer allocations
  }
  EXPECT_GT(num_broken, 20);
}

}  // namespace
}  // namespace flashquant
