// A real model behind the engine: answers and their logprobs have the same bits with and without
// the prefix cache, under preemption, priorities and a pool that is too small for all.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/model/served_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

constexpr int kNumRequests = 24;

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  Usage usage;
  bool operator==(const Answer& other) const {
    return tokens == other.tokens && logprobs == other.logprobs;
  }
};

class SharedPrefixTest : public testing::Test {
 protected:
  // A third of the requests each begin alike; every answer has a seed of its own.
  static GenerateRequest MakeRequest(int index) {
    std::mt19937 random(static_cast<uint32_t>(index % 3));
    GenerateRequest request;
    request.request_id = std::to_string(index);
    for (int i = 0; i < 40; ++i)
      request.prompt_tokens.push_back(static_cast<int32_t>(random() % 8000));
    random.seed(static_cast<uint32_t>(1000 + index));
    for (int i = 0; i < 1 + index % 20; ++i) {
      request.prompt_tokens.push_back(static_cast<int32_t>(random() % 8000));
    }
    request.sampling.seed = static_cast<uint64_t>(index);
    request.sampling.top_logprobs = 0;
    request.stop.max_output_tokens = 16;
    request.stop.ignore_eos = true;
    request.priority = index % 5 - 2;
    return request;
  }

  void SetUp() override {
    options_.path = "deploy/demo-model";
    options_.backend.kind = "cpu";
    options_.backend.num_threads = 2;
    options_.engine.context_length = 128;
    options_.engine.block_tokens = 8;
  }
  void Load() {
    auto served = LoadServedModel(options_);
    FQ_ASSERT_OK(served);
    served_ = std::make_unique<ServedModel>(*std::move(served));
  }
  std::unique_ptr<Engine> Start(bool prefix_cache) {
    EngineConfig config = served_->engine;
    config.prefix_cache = prefix_cache;
    EngineDependencies dependencies;
    dependencies.runner = served_->runner.get();
    dependencies.vocab_size = served_->config.vocab_size;
    auto engine = Engine::Create(config, dependencies);
    FQ_EXPECT_OK(engine);
    return *std::move(engine);
  }
  static Answer Read(RequestStream& stream) {
    Answer answer;
    while (true) {
      StreamUpdate update = stream.WaitAndTake();
      answer.tokens.insert(answer.tokens.end(), update.token_ids.begin(), update.token_ids.end());
      for (const OutputLogprobs& logprobs : update.logprobs) {
        answer.logprobs.push_back(logprobs.chosen.logprob);
      }
      if (!update.finished) continue;
      FQ_EXPECT_OK(update.finished->status);
      answer.usage = update.finished->usage;
      return answer;
    }
  }
  static std::vector<Answer> RunAll(Engine& engine) {
    std::vector<std::shared_ptr<RequestStream>> streams;
    for (int i = 0; i < kNumRequests; ++i) {
      auto stream = engine.Submit(MakeRequest(i));
      FQ_EXPECT_OK(stream);
      streams.push_back(*std::move(stream));
    }
    std::vector<Answer> answers;
    for (const auto& stream : streams) answers.push_back(Read(*stream));
    EXPECT_EQ(engine.stats().kv_blocks_unaccounted, 0);
    return answers;
  }
  // One after the other, nothing shared.
  std::vector<Answer> RunAlone() {
    const std::unique_ptr<Engine> engine = Start(false);
    std::vector<Answer> answers;
    for (int i = 0; i < kNumRequests; ++i) {
      auto stream = engine->Submit(MakeRequest(i));
      FQ_EXPECT_OK(stream);
      answers.push_back(Read(**stream));
      EXPECT_EQ(answers.back().usage.cached_prompt_tokens, 0);
      EXPECT_EQ(answers.back().logprobs.size(), answers.back().tokens.size());
    }
    return answers;
  }
  static int64_t Cached(const std::vector<Answer>& answers) {
    int64_t total = 0;
    for (const Answer& answer : answers) total += answer.usage.cached_prompt_tokens;
    return total;
  }

  ServedModelOptions options_;
  std::unique_ptr<ServedModel> served_;
};

TEST_F(SharedPrefixTest, AnswersHaveTheSameBitsWithAndWithoutTheCache) {
  options_.engine.max_sequences = 8;
  Load();
  const std::vector<Answer> alone = RunAlone();
  const std::unique_ptr<Engine> engine = Start(true);
  const std::vector<Answer> first = RunAll(*engine);
  const std::vector<Answer> second = RunAll(*engine);
  EXPECT_EQ(first, alone);
  EXPECT_EQ(second, alone);
  EXPECT_GT(Cached(first), 0);
  // The second time every prompt is there but for its last block.
  EXPECT_GE(Cached(second), kNumRequests * 40);
  EXPECT_GT(engine->stats().kv_blocks_cached, 0);
  engine->ResetPrefixCache();
  const Answer again = Read(**engine->Submit(MakeRequest(0)));
  EXPECT_EQ(again, alone[0]);
  EXPECT_EQ(again.usage.cached_prompt_tokens, 0);
}

TEST_F(SharedPrefixTest, APoolThatIsTooSmallChangesNoAnswer) {
  options_.engine.max_sequences = 8;
  options_.engine.num_blocks = 41;  // 40 usable; a request takes 8 to 10
  options_.engine.run_ahead = true;
  Load();
  const std::vector<Answer> alone = RunAlone();
  const std::unique_ptr<Engine> engine = Start(true);
  const std::vector<Answer> crowded = RunAll(*engine);
  EXPECT_EQ(crowded, alone);
  EXPECT_GT(Cached(crowded), 0);
  const bool any_preempted = std::ranges::any_of(
      crowded, [](const Answer& answer) { return answer.usage.preemptions > 0; });
  EXPECT_TRUE(any_preempted);
}

}  // namespace
}  // namespace flashquant
