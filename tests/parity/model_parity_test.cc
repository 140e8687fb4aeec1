// Whole models on the CUDA backend: against Hugging Face transformers' float32 values, and against
// the CPU backend. Tolerances are those of BF16 activations. Skipped, by name, without a device.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/json.h"
#include "engine/engine.h"
#include "engine/model/rope_table.h"
#include "engine/model/served_model.h"
#include "engine/model/text_scorer.h"
#include "gtest/gtest.h"
#include "kernels/backend_factory.h"
#include "kernels/base/bfloat16.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tensor_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

constexpr float kLogitTolerance = 0.1f;
constexpr double kTieGap = 0.15;  // two logits nearer than this may swap places in BF16
constexpr double kPerplexityTolerance = 0.003;
constexpr double kFp8PerplexityTolerance = 0.01;
constexpr int32_t kContext = 512;
constexpr int64_t kMaxTextBytes = int64_t{16} << 20;

class ModelParityTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto backend = CreateBackend({.kind = "cuda"});
    if (!backend.ok()) GTEST_SKIP() << "needs a CUDA device: " << backend.status().message();
  }

  static LoadedModel Load(const std::string& path, const char* backend, int32_t context = kContext,
                          const char* kv_cache_dtype = "auto") {
    auto loaded =
        LoadModel(path, context, {.kind = backend, .kv_cache_dtype = kv_cache_dtype}, nullptr);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return *std::move(loaded);
  }

  // Logits after each of `tokens`, one row after the other.
  static std::vector<float> Logits(const LoadedModel& loaded, const std::vector<int32_t>& tokens) {
    std::vector<float> all;
    const auto scorer = TextScorer::Create(loaded.model.get(), loaded.backend.get(), 64);
    EXPECT_TRUE(scorer.ok()) << scorer.status();
    const absl::Status status =
        (*scorer)->VisitLogits(tokens, [&](int32_t /*position*/, std::span<const float> logits) {
          all.insert(all.end(), logits.begin(), logits.end());
        });
    EXPECT_TRUE(status.ok()) << status;
    return all;
  }

  static void ExpectNearCpu(const std::string& path, const std::vector<int32_t>& tokens) {
    // A key or value that BF16 moved over the middle of two FP8 codes is a whole code away.
    for (const auto& [kv_cache_dtype, limit] : {std::pair{"auto", 1e-3}, std::pair{"fp8", 5e-3}}) {
      const std::vector<float> expected = Logits(Load(path, "cpu", 64, kv_cache_dtype), tokens);
      const std::vector<float> actual = Logits(Load(path, "cuda", 64, kv_cache_dtype), tokens);
      const std::vector<double> oracle(expected.begin(), expected.end());
      EXPECT_TRUE(NmseBelow(actual, oracle, limit)) << path << ", KV cache " << kv_cache_dtype;
    }
  }

  // Of the first windows of story-22m's held-out text.
  static double StoryPerplexity(const LoadedModel& loaded, size_t num_windows) {
    const auto text = ReadFile(SharedDataPath("models/story-22m/heldout.txt"), kMaxTextBytes);
    EXPECT_TRUE(text.ok()) << text.status();
    const std::vector<int32_t> tokens = loaded.tokenizer->Encode(*text, SpecialText::kPlain);
    const auto scorer = TextScorer::Create(loaded.model.get(), loaded.backend.get(), kContext);
    EXPECT_TRUE(scorer.ok()) << scorer.status();
    double sum = 0.0;
    for (size_t window = 0; window < num_windows; ++window) {
      const auto nll =
          (*scorer)->NegativeLogLikelihood(std::span(tokens).subspan(window * kContext, kContext));
      EXPECT_TRUE(nll.ok()) << nll.status();
      sum += *nll;
    }
    return std::exp(sum / static_cast<double>(num_windows * (kContext - 1)));
  }

  static nlohmann::json StoryReference() {
    auto reference = ReadJsonFile(SharedDataPath("models/story-22m/reference.json"));
    EXPECT_TRUE(reference.ok()) << reference.status();
    return *std::move(reference);
  }
};

// Answers of all requests, which run together.
std::vector<std::vector<int32_t>> AnswerTogether(const ServedModel& served,
                                                 const std::vector<std::vector<int32_t>>& prompts,
                                                 int32_t num_outputs) {
  auto engine = Engine::Create(
      served.engine, {.runner = served.runner.get(), .vocab_size = served.config.vocab_size});
  EXPECT_TRUE(engine.ok()) << engine.status();
  std::vector<std::shared_ptr<RequestStream>> streams;
  for (size_t i = 0; i < prompts.size(); ++i) {
    GenerateRequest request;
    request.request_id = std::to_string(i);
    request.prompt_tokens = prompts[i];
    request.sampling.temperature = 0.0f;
    request.stop.max_output_tokens = num_outputs;
    request.stop.ignore_eos = true;
    auto stream = (*engine)->Submit(std::move(request));
    EXPECT_TRUE(stream.ok()) << stream.status();
    streams.push_back(*std::move(stream));
  }
  std::vector<std::vector<int32_t>> answers(prompts.size());
  for (size_t i = 0; i < streams.size(); ++i) {
    for (bool finished = false; !finished;) {
      const StreamUpdate update = streams[i]->WaitAndTake();
      answers[i].insert(answers[i].end(), update.token_ids.begin(), update.token_ids.end());
      finished = update.finished.has_value();
      if (finished) {
        FQ_EXPECT_OK(update.finished->status);
      }
    }
  }
  EXPECT_EQ((*engine)->stats().kv_blocks_unaccounted, 0);
  return answers;
}

TEST_F(ModelParityTest, FirstLogitsEqualTheReference) {
  FQ_SKIP_WITHOUT_SHARED_DATA("models/story-22m");
  const LoadedModel loaded = Load(SharedDataPath("models/story-22m"), "cuda");
  const nlohmann::json reference = StoryReference();
  for (const nlohmann::json& entry : reference["greedy"]) {
    const auto prompt = entry["prompt_ids"].get<std::vector<int32_t>>();
    const std::vector<float> logits = Logits(loaded, prompt);
    const auto vocab_size = static_cast<size_t>(loaded.config.vocab_size);
    ASSERT_EQ(logits.size(), prompt.size() * vocab_size);
    for (const nlohmann::json& top : entry["first_logits_top10"]) {
      EXPECT_NEAR(logits[(prompt.size() - 1) * vocab_size + top[0].get<size_t>()],
                  top[1].get<float>(), kLogitTolerance);
    }
  }
}

// Many requests at once, with and without a step in flight while the next is made: prompts and
// single rows in one step, padding rows, blocks that go from one request to the next.
TEST_F(ModelParityTest, GreedyAnswersOfABatchEqualTheReference) {
  FQ_SKIP_WITHOUT_SHARED_DATA("models/story-22m");
  const nlohmann::json reference = StoryReference();
  for (const bool run_ahead : {false, true}) {
    ServedModelOptions options;
    options.path = SharedDataPath("models/story-22m");
    options.backend.kind = "cuda";
    options.engine.context_length = 256;
    options.engine.max_sequences = 11;
    options.engine.token_budget = 32;
    options.engine.run_ahead = run_ahead;
    const auto served = LoadServedModel(options);
    FQ_ASSERT_OK(served);
    std::vector<std::vector<int32_t>> prompts;
    for (int copy = 0; copy < 9; ++copy) {
      for (const nlohmann::json& entry : reference["greedy"])
        prompts.push_back(entry["prompt_ids"]);
    }
    const auto answers = AnswerTogether(*served, prompts, 64);
    for (size_t i = 0; i < answers.size(); ++i) {
      const nlohmann::json& entry = reference["greedy"][i % 3];
      const auto expected = entry["output_ids"].get<std::vector<int32_t>>();
      const auto gaps = entry["top2_gap"].get<std::vector<double>>();
      ASSERT_EQ(answers[i].size(), expected.size());
      for (size_t j = 0; j < expected.size() && gaps[j] >= kTieGap; ++j) {
        ASSERT_EQ(answers[i][j], expected[j]) << "request " << i << ", output " << j;
      }
    }
  }
}

TEST_F(ModelParityTest, PerplexityEqualsTheReference) {
  FQ_SKIP_WITHOUT_SHARED_DATA("models/story-22m");
  const nlohmann::json expected = StoryReference()["perplexity"][0];
  ASSERT_EQ(expected["context"].get<int32_t>(), kContext);
  const LoadedModel loaded = Load(SharedDataPath("models/story-22m"), "cuda");
  const double perplexity = StoryPerplexity(loaded, expected["windows"].get<size_t>());
  const auto reference = expected["perplexity"].get<double>();
  RecordProperty("perplexity", std::to_string(perplexity));
  EXPECT_NEAR(perplexity, reference, kPerplexityTolerance * reference);
}

TEST_F(ModelParityTest, PerplexityWithAnFP8KvCacheIsNearTheReference) {
  FQ_SKIP_WITHOUT_SHARED_DATA("models/story-22m");
  const nlohmann::json expected = StoryReference()["perplexity"][0];
  const LoadedModel loaded = Load(SharedDataPath("models/story-22m"), "cuda", kContext, "fp8");
  const double perplexity = StoryPerplexity(loaded, expected["windows"].get<size_t>());
  const auto reference = expected["perplexity"].get<double>();
  RecordProperty("perplexity", std::to_string(perplexity));
  EXPECT_NEAR(perplexity, reference, kFp8PerplexityTolerance * reference);
}

constexpr const char* kTinyModels[] = {"llama", "llama3-rope", "mistral-window",
                                       "opt",   "qwen2",       "qwen3"};

// The tiny models' values were made with rotary frequencies rounded to BF16 (reference_test.cc).
std::vector<float> RoundedRopeTable(const ModelConfig& config, int32_t context) {
  if (config.family == DecoderFamily::kOpt) return MakeRopeTable(config, context);
  std::vector<float> frequencies = RopeInverseFrequencies(config.rope, config.head_dim);
  for (float& frequency : frequencies) frequency = ToFloat(ToBFloat16(frequency));
  return MakeRopeTable(frequencies, context);
}

TEST_F(ModelParityTest, TinyModelsEqualTheReference) {
  for (const char* name : kTinyModels) {
    SCOPED_TRACE(name);
    const std::string path = TestDataPath(std::string("tiny_models/") + name);
    const auto reference = ReadJsonFile(path + "/expected.json");
    FQ_ASSERT_OK(reference);
    LoadedModel loaded = Load(path, "cuda", 64);
    const auto checkpoint = OpenCheckpoint(path);
    FQ_ASSERT_OK(checkpoint);
    auto model = DecoderModel::Load(*checkpoint, loaded.config, RoundedRopeTable(loaded.config, 64),
                                    loaded.backend.get(), nullptr);
    FQ_ASSERT_OK(model);
    loaded.model = *std::move(model);
    const auto vocab_size = static_cast<size_t>(loaded.config.vocab_size);
    for (const nlohmann::json& sequence : (*reference)["sequences"]) {
      const auto argmax = sequence["argmax_per_position"].get<std::vector<size_t>>();
      const std::vector<float> logits = Logits(loaded, sequence["input_ids"]);
      ASSERT_EQ(logits.size(), argmax.size() * vocab_size);
      for (size_t position = 0; position < argmax.size(); ++position) {
        const auto row = std::span(logits).subspan(position * vocab_size, vocab_size);
        EXPECT_LT(*std::max_element(row.begin(), row.end()) - row[argmax[position]], kTieGap)
            << "position " << position;
      }
      EXPECT_TRUE(NmseBelow(std::span(logits).last(vocab_size),
                            sequence["last_logits"].get<std::vector<double>>(), 1e-3));
    }
  }
}

TEST_F(ModelParityTest, LogitsAreThoseOfTheCpuBackend) {
  for (const char* name : kTinyModels) {
    const auto reference =
        ReadJsonFile(TestDataPath(std::string("tiny_models/") + name) + "/expected.json");
    FQ_ASSERT_OK(reference);
    for (const nlohmann::json& sequence : (*reference)["sequences"]) {
      ExpectNearCpu(TestDataPath(std::string("tiny_models/") + name), sequence["input_ids"]);
    }
  }
}

TEST_F(ModelParityTest, AQuantizedModelsLogitsAreThoseOfTheCpuBackend) {
  ExpectNearCpu("deploy/demo-model", {0, 3208, 669, 260, 556, 452, 308, 260, 467, 851});
}

}  // namespace
}  // namespace flashquant
