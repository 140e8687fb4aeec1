// EngineTest: an engine with a pretended model and a clock that the test moves.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_step_runner.h"
#include "tests/support/status_matchers.h"

namespace flashquant {

inline EngineConfig SmallConfig() {
  EngineConfig config;
  config.context_length = 64;
  config.max_sequences = 8;
  config.token_budget = 16;
  config.max_waiting = 4;
  config.block_tokens = 4;
  config.num_blocks = 65;
  return config;
}

inline GenerateRequest Request(std::string id, std::vector<int32_t> prompt, int max_output_tokens) {
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

inline Answer ReadAll(RequestStream& stream) {
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
  // Starts an engine in which one request runs and another has waited behind it past its queue
  // deadline when the steps go on.
  struct LateQueue {
    std::shared_ptr<RequestStream> running;
    std::shared_ptr<RequestStream> waiting;
  };
  LateQueue LetOneWaitTooLong() {
    EngineConfig config = SmallConfig();
    config.max_sequences = 1;
    Start(config);
    runner_->CloseGate();
    LateQueue queue;
    queue.running = Submit(Request("running", {1}, 2));
    runner_->WaitUntilAtGate();
    GenerateRequest request = Request("waiting", {1}, 2);
    request.queue_deadline = clock_.Now() + std::chrono::seconds(5);
    queue.waiting = Submit(request);
    clock_.Advance(std::chrono::seconds(6));
    runner_->OpenGate();
    return queue;
  }
  // Everything is back: no request, no block.
  void ExpectIdle() {
    engine_->Drain(clock_.Now() + std::chrono::seconds(60));
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

}  // namespace flashquant
