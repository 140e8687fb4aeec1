// The whole server but gRPC itself, in process (target F14): submitter, engine with its thread,
// delivery thread, sessions. Input: bytes of a configuration, then a script: requests, cancels,
// writes that end, fail or hang, a device that stands still, a drain.
//
// Properties: an accepted call ends exactly once, a refused one is never written to, messages come
// in order with one write in flight, and after the script nothing is open, running or allocated.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "server/call_submitter.h"
#include "server/delivery_thread.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/support/fake_step_runner.h"

namespace flashquant {
namespace {

constexpr int kMaxCalls = 24;
constexpr int kMaxOperations = 100;
constexpr uint64_t kNonFiniteSeed = 3;

// One RPC. Told by the delivery thread; asked by the script.
class Call final : public CallSink {
 public:
  explicit Call(DeliveryThread* delivery) : delivery_(delivery) {}

  void Write(v1::GenerateResponse response) override {
    MutexLock lock(&mu_);
    Require(!ended_, "a write after the end");
    Require(!in_flight_, "two writes in flight");
    Require(response.has_accepted() == (num_messages_ == 0), "Accepted comes first, once");
    Require(!response.has_finished(), "Finished without the end");
    ++num_messages_;
    in_flight_ = true;
  }
  void WriteAndFinish(v1::GenerateResponse response) override {
    Require(response.has_finished(), "an end without Finished");
    MutexLock lock(&mu_);
    Require(!in_flight_, "two writes in flight");
    End();
  }
  void Finish(const RequestError& error) override {
    Require(error.code != absl::StatusCode::kOk, "an error that is none");
    MutexLock lock(&mu_);
    End();
  }

  // What gRPC does when a write is over. Whether one was in flight.
  bool EndWrite(bool ok) {
    {
      MutexLock lock(&mu_);
      if (!in_flight_) return false;
      in_flight_ = false;
    }
    delivery_->OnWriteDone(session, ok);
    return true;
  }
  bool ended() {
    MutexLock lock(&mu_);
    return ended_;
  }

  std::shared_ptr<GenerateSession> session;  // null when refused

 private:
  void End() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Require(!ended_, "two ends");
    ended_ = true;
  }
  DeliveryThread* const delivery_;
  Mutex mu_;
  int num_messages_ ABSL_GUARDED_BY(mu_) = 0;
  bool in_flight_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

class Run {
 public:
  explicit Run(FuzzInput input)
      : input_(input),
        config_(Config(&input_)),
        runner_(config_.num_blocks, config_.block_tokens),
        submitter_(&clock_, nullptr, std::chrono::seconds(1000)),
        delivery_(&clock_, std::chrono::seconds(1000)) {
    runner_.SetNonFinite([](const SequenceStep& step) {
      return step.sampling->seed == kNonFiniteSeed && step.output_position == 1;
    });
    EngineDependencies dependencies;
    dependencies.runner = &runner_;
    dependencies.clock = &clock_;
    dependencies.listener = &delivery_;
    dependencies.vocab_size = FakeModel().vocab_size;
    auto engine = Engine::Create(config_, dependencies);
    Require(engine.ok(), "engine");
    engine_ = *std::move(engine);
    MapperOptions mapper;
    mapper.limits.model_name = "m";
    mapper.limits.vocab_size = FakeModel().vocab_size;
    mapper.limits.context_length = config_.context_length;
    mapper.max_request_duration = std::chrono::seconds(1000);
    mapper.random = [next = uint64_t{0}]() mutable { return next++; };
    submitter_.SetServing(std::make_unique<ServingModel>(std::move(mapper), engine_.get()));
  }

  void All() {
    for (int i = 0; i < kMaxOperations && !input_.empty(); ++i) Operation();
    runner_.OpenGate();
    const bool hurry = input_.Chance(2);
    if (hurry) engine_->Drain(clock_.Now());
    const TimePoint limit = clock_.Now() + std::chrono::seconds(4);
    while (!AllEnded()) {
      Require(clock_.Now() < limit, "a call without an end");
      bool worked = false;
      for (const auto& call : calls_) worked = call->EndWrite(true) || worked;
      if (!worked) std::this_thread::yield();
    }
    engine_->Drain(clock_.Now() + std::chrono::seconds(4));
    const EngineStats stats = engine_->stats();
    Require(stats.requests_waiting + stats.requests_running + stats.requests_preempted == 0,
            "requests are left");
    Require(stats.kv_blocks_used == 0 && stats.kv_blocks_unaccounted == 0, "blocks are left");
    engine_.reset();
    Require(runner_.violation().empty(), runner_.violation());
  }

 private:
  static EngineConfig Config(FuzzInput* input) {
    EngineConfig config;
    config.context_length = 64;
    config.max_sequences = input->Number(1, 8);
    config.token_budget = input->Number(config.max_sequences, 32);
    config.max_waiting = input->Number(1, 8);
    config.block_tokens = 4;
    config.num_blocks = input->Number(2, 40);
    return config;
  }

  void Operation() {
    switch (input_.Number(0, 9)) {
      case 0:
      case 1:
      case 2:
        return Submit();
      case 3:
        return Cancel();
      case 4:
      case 5:
        if (!calls_.empty()) AnyCall().EndWrite(true);
        return;
      case 6:
        if (!calls_.empty()) AnyCall().EndWrite(input_.Chance(2));
        return;
      case 7:
        runner_.CloseGate();
        return;
      case 8:
        runner_.OpenGate();
        return;
      default:
        std::this_thread::yield();
    }
  }
  void Submit() {
    if (calls_.size() >= kMaxCalls) return;
    v1::GenerateRequest request;
    const int32_t prompt = input_.Number(0, 40);
    for (int32_t i = 0; i < prompt; ++i) request.mutable_token_ids()->add_ids(7);
    request.mutable_stop()->set_max_output_tokens(static_cast<uint32_t>(input_.Number(0, 40)));
    request.mutable_sampling()->set_seed(static_cast<uint64_t>(input_.Number(0, 3)));
    request.mutable_output()->set_token_ids(input_.Chance(2));
    if (input_.Chance(4)) request.set_request_id("same");
    CallTimes times;
    times.now = clock_.Now();
    if (input_.Chance(8)) {
      times.client_deadline = times.now + std::chrono::microseconds(input_.Number(0, 255));
    }
    auto call = std::make_unique<Call>(&delivery_);
    const auto error = submitter_.Submit(request, times, call.get(), &call->session);
    Require(error.has_value() == (call->session == nullptr), "neither accepted nor refused");
    if (error) {
      Require(!call->ended(), "a refused call was told so by the engine");
      return;
    }
    delivery_.Register(call->session);
    calls_.push_back(std::move(call));
  }
  Call& AnyCall() {
    return *calls_[static_cast<size_t>(input_.Number(0, static_cast<int32_t>(calls_.size()) - 1))];
  }
  void Cancel() {
    if (!calls_.empty()) AnyCall().session->Cancel(CancelReason::kClient);
  }
  bool AllEnded() {
    for (const auto& call : calls_) {
      if (!call->ended()) return false;
    }
    return true;
  }

  FuzzInput input_;
  const SteadyClock clock_;
  const EngineConfig config_;
  FakeStepRunner runner_;
  CallSubmitter submitter_;
  std::vector<std::unique_ptr<Call>> calls_;
  DeliveryThread delivery_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashquant::Run({data, size}).All();
  return 0;
}
