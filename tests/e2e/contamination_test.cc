// Gate K13: no request ever gets anything of another. Prompts with seeds, some of which begin
// alike, run alone on a server without a prefix cache; then all at once in many random orders on
// one whose pool is far too small, with a prefix cache, priorities and cancels. The ids must be the
// same to the last one.
//
// Short here; FQ_SOAK=1 runs the long form (tests/soak/run.sh).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "tests/e2e/model_server.h"

namespace flashquant {
namespace {

constexpr int kRowMultiple = 8;
constexpr int kNumClients = 24;
constexpr uint32_t kOutputTokens = 32;
constexpr int kNumBeginnings = 4;
constexpr uint32_t kBeginningTokens = 40;

bool Soak() { return std::getenv("FQ_SOAK") != nullptr; }

EngineConfig Config(int32_t num_blocks, bool prefix_cache) {
  EngineConfig config;
  config.context_length = 128;
  config.max_sequences = 16;
  config.token_budget = 48;
  config.num_blocks = num_blocks;
  config.prefix_cache = prefix_cache;
  return config;
}

struct Case {
  v1::GenerateRequest request;
  Answer alone;
};

std::vector<Case> MakeCases(int count, uint32_t vocab_size) {
  std::mt19937 random(1313);
  const auto draw = [&](uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>(random() % (high - low + 1));
  };
  std::vector<std::vector<uint32_t>> beginnings(kNumBeginnings);
  for (auto& beginning : beginnings) {
    for (uint32_t i = 0; i < kBeginningTokens; ++i) beginning.push_back(draw(0, vocab_size - 1));
  }
  std::vector<Case> cases(static_cast<size_t>(count));
  for (Case& one : cases) {
    v1::GenerateRequest& request = one.request;
    auto* ids = request.mutable_token_ids()->mutable_ids();
    if (draw(0, 1) == 0) {
      const auto& beginning = beginnings[draw(0, kNumBeginnings - 1)];
      ids->Add(beginning.begin(), beginning.end());
    }
    for (uint32_t i = draw(1, 30); i > 0; --i) ids->Add(draw(0, vocab_size - 1));
    request.mutable_sampling()->set_seed(random());
    request.mutable_sampling()->set_temperature(draw(0, 2) == 0 ? 0.0f : 0.9f);
    request.mutable_stop()->set_max_output_tokens(kOutputTokens);
    request.mutable_stop()->set_ignore_eos(true);
    request.mutable_output()->set_token_ids(true);
  }
  return cases;
}

// All cases once, in this order, by kNumClients clients; every tenth call is cancelled somewhere.
void RunShuffled(const std::string& target, const std::vector<Case>& cases,
                 const std::vector<size_t>& order, uint32_t seed) {
  std::atomic<size_t> next{0};
  std::vector<std::thread> clients;
  std::vector<std::string> wrong(kNumClients);
  for (int client = 0; client < kNumClients; ++client) {
    clients.emplace_back([&, client] {
      std::mt19937 random(seed + static_cast<uint32_t>(client));
      for (size_t at = next++; at < order.size(); at = next++) {
        const Case& one = cases[order[at]];
        const int cancel_after =
            random() % 10 == 0 ? static_cast<int>(random() % kOutputTokens) : -1;
        const Answer answer = RunOne(target, one.request, cancel_after);
        const bool whole = answer.result.ok() && answer.ids == one.alone.ids;
        const bool cut = cancel_after >= 0 && answer.ids.size() <= one.alone.ids.size() &&
                         std::equal(answer.ids.begin(), answer.ids.end(), one.alone.ids.begin());
        if (!whole && !cut) {
          wrong[static_cast<size_t>(client)] +=
              fmt::format("case {}: {} ids, code {} {}; ", order[at], answer.ids.size(),
                          answer.result.code, answer.result.message);
        }
      }
    });
  }
  for (std::thread& client : clients) client.join();
  for (const std::string& text : wrong) EXPECT_EQ(text, "");
}

// S3, T14
TEST(ContaminationTest, NoAnswerDependsOnWhoSharesBatchPoolOrPrefix) {
  const int num_cases = Soak() ? 500 : 100;
  const int num_shuffles = Soak() ? 20 : 5;
  std::vector<Case> cases;
  {
    ModelServer alone(Config(400, false), kRowMultiple);
    ASSERT_TRUE(alone.ok());
    cases = MakeCases(num_cases, static_cast<uint32_t>(alone.model().config.vocab_size));
    for (Case& one : cases) {
      one.alone = RunOne(alone.target(), one.request, -1);
      ASSERT_EQ(one.alone.ids.size(), kOutputTokens) << one.alone.result.message;
    }
  }
  // A quarter of what sixteen sequences of up to seven blocks would need.
  ModelServer together(Config(29, true), kRowMultiple);
  ASSERT_TRUE(together.ok());
  std::mt19937 random(31);
  for (int shuffle = 0; shuffle < num_shuffles && !testing::Test::HasFailure(); ++shuffle) {
    SCOPED_TRACE(fmt::format("shuffle {}", shuffle));
    std::vector<size_t> order(cases.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::shuffle(order, random);
    RunShuffled(together.target(), cases, order, static_cast<uint32_t>(shuffle) * 100);
  }
  EXPECT_TRUE(Eventually([&] { return together.engine().stats().kv_blocks_used == 0; }));
  EXPECT_EQ(together.engine().stats().kv_blocks_unaccounted, 0);
  // It was tight, and something was shared and given up: else nothing is shown.
  const Exposition metrics = together.Scrape();
  EXPECT_GT(metrics.Sum("flashquant_preemptions_total"), 0);
  EXPECT_GT(metrics.Sum("flashquant_input_tokens_total", {{"kind", "cached"}}), 0);
  EXPECT_GT(metrics.Sum("flashquant_stream_aborts_total"), 0);
  fmt::print("K13: {} prompts, {} shuffles, {} preemptions, {} prompt tokens from the cache\n",
             num_cases, num_shuffles, metrics.Sum("flashquant_preemptions_total"),
             metrics.Sum("flashquant_input_tokens_total", {{"kind", "cached"}}));
}

}  // namespace
}  // namespace flashquant
