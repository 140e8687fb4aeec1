// Whole models with a KV cache of BF16 or FP8: how far their predictions move, the scales that a
// checkpoint may bring for FP8, and what the type does to the size of a pool.
#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/model/memory_plan.h"
#include "engine/model/served_model.h"
#include "engine/model/text_scorer.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

constexpr int32_t kContext = 128;
const char kKScale[] = "model.layers.1.self_attn.k_scale";

absl::StatusOr<LoadedModel> Load(const std::string& path, const char* kv_cache_dtype) {
  return LoadModel(path, kContext,
                   {.kind = "cpu", .num_threads = 2, .kv_cache_dtype = kv_cache_dtype}, nullptr);
}

// Mean of -ln p over windows of kContext tokens.
double MeanLoss(const LoadedModel& loaded, std::span<const int32_t> tokens) {
  const auto scorer = TextScorer::Create(loaded.model.get(), loaded.backend.get(), kContext);
  EXPECT_TRUE(scorer.ok()) << scorer.status();
  double sum = 0;
  size_t count = 0;
  for (size_t first = 0; first + kContext <= tokens.size(); first += kContext) {
    const absl::StatusOr<double> loss =
        (*scorer)->NegativeLogLikelihood(tokens.subspan(first, kContext));
    EXPECT_TRUE(loss.ok()) << loss.status();
    sum += loss.value_or(0);
    count += kContext - 1;
  }
  return sum / static_cast<double>(count);
}

double LossOf(const std::string& path, const char* kv_cache_dtype,
              std::span<const int32_t> tokens) {
  const absl::StatusOr<LoadedModel> loaded = Load(path, kv_cache_dtype);
  EXPECT_TRUE(loaded.ok()) << loaded.status();
  return loaded.ok() ? MeanLoss(*loaded, tokens) : 0;
}

std::vector<int32_t> SomeTokens() {
  std::vector<int32_t> tokens(2 * kContext);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * i * 7 % 101 + 3);
  return tokens;
}

TEST(KvCacheDTypeTest, EveryFamilyPredictsAboutTheSame) {
  for (const char* name : {"llama", "llama3-rope", "mistral-window", "opt", "qwen2", "qwen3"}) {
    const std::string path = TestDataPath("tiny_models/") + name;
    const std::vector<int32_t> tokens = SomeTokens();
    const double floats = LossOf(path, "auto", tokens);
    const double bfloat16 = LossOf(path, "bf16", tokens);
    const double fp8 = LossOf(path, "fp8", tokens);
    EXPECT_NE(bfloat16, floats) << name;
    EXPECT_NE(fp8, bfloat16) << name;
    EXPECT_NEAR(bfloat16, floats, 0.002 * floats) << name;
    EXPECT_NEAR(fp8, floats, 0.02 * floats) << name;
  }
}

TEST(KvCacheDTypeTest, PerplexityOfATrainedModelHardlyMoves) {
  FQ_SKIP_WITHOUT_SHARED_DATA("models/story-22m");
  const std::string path = SharedDataPath("models/story-22m");
  const absl::StatusOr<std::string> text = ReadFile(path + "/heldout.txt", 1 << 24);
  ASSERT_TRUE(text.ok()) << text.status();
  std::map<std::string, double> loss;
  for (const char* dtype : {"auto", "bf16", "fp8"}) {
    const absl::StatusOr<LoadedModel> loaded = Load(path, dtype);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    std::vector<int32_t> tokens =
        loaded->tokenizer->Encode(text->substr(0, 20000), SpecialText::kPlain);
    tokens.resize(16 * kContext);
    loss[dtype] = MeanLoss(*loaded, tokens);
  }
  EXPECT_LT(std::fabs(std::expm1(loss["bf16"] - loss["auto"])), 0.001);
  EXPECT_LT(std::fabs(std::expm1(loss["fp8"] - loss["auto"])), 0.01);
}

class KvScalesTest : public testing::Test {
 protected:
  KvScalesTest() {
    std::string pattern = testing::TempDir() + "/fq_kv_XXXXXX";
    EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  ~KvScalesTest() override { std::filesystem::remove_all(folder_); }

  // A copy of the small llama with more FP32 tensors of these shapes.
  struct Extra {
    std::string name;
    std::vector<int64_t> shape;
    std::vector<float> values;
  };
  std::string Write(const std::vector<Extra>& extras) const {
    const std::string source = TestDataPath("tiny_models/llama/");
    for (const char* name : {"config.json", "generation_config.json"}) {
      std::filesystem::copy_file(source + name, folder_ + "/" + name,
                                 std::filesystem::copy_options::overwrite_existing);
    }
    const absl::StatusOr<Checkpoint> checkpoint = OpenCheckpoint(source);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    std::filesystem::remove(folder_ + "/model.safetensors");
    const auto writer = SafetensorsWriter::Create(folder_ + "/model.safetensors");
    EXPECT_TRUE(writer.ok()) << writer.status();
    for (const TensorInfo& tensor : checkpoint->tensors->tensors()) {
      const auto bytes = checkpoint->tensors->ReadBytes(tensor.name);
      EXPECT_TRUE((*writer)->Begin(tensor.name, tensor.dtype, tensor.shape).ok());
      EXPECT_TRUE((*writer)->Append(*bytes).ok());
    }
    for (const Extra& extra : extras) {
      EXPECT_TRUE((*writer)->Begin(extra.name, DType::kF32, extra.shape).ok());
      EXPECT_TRUE((*writer)
                      ->Append({reinterpret_cast<const uint8_t*>(extra.values.data()),
                                extra.values.size() * sizeof(float)})
                      .ok());
    }
    EXPECT_TRUE((*writer)->Finish().ok());
    return folder_;
  }

  std::string folder_;
};

TEST_F(KvScalesTest, TheCheckpointsAreUsedAndElseOne) {
  const std::string path =
      Write({{kKScale, {}, {0.25f}}, {"model.layers.1.self_attn.v_proj.v_scale", {1}, {0.5f}}});
  const absl::StatusOr<LoadedModel> loaded = Load(path, "fp8");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const std::vector<LayerWeights>& layers = loaded->model->weights().layers;
  EXPECT_EQ(layers[0].kv_scales.k, 1.0f);
  EXPECT_EQ(layers[0].kv_scales.v, 1.0f);
  EXPECT_EQ(layers[1].kv_scales.k, 0.25f);
  EXPECT_EQ(layers[1].kv_scales.v, 0.5f);
}

TEST_F(KvScalesTest, OnlyAnFP8CacheLooksAtThem) {
  const std::vector<int32_t> tokens = SomeTokens();
  const std::string plain = TestDataPath("tiny_models/llama");
  const double floats = LossOf(plain, "auto", tokens);
  const double fp8 = LossOf(plain, "fp8", tokens);
  // All keys of the layer are clamped to 448e-6.
  const std::string path = Write({{kKScale, {1}, {1e-6f}}});
  EXPECT_EQ(LossOf(path, "auto", tokens), floats);
  EXPECT_GT(std::fabs(LossOf(path, "fp8", tokens) - floats), 5 * std::fabs(fp8 - floats));
}

TEST_F(KvScalesTest, ANumberThatIsNoScaleIsRefusedByName) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Extra& extra :
       {Extra{kKScale, {2}, {1, 1}}, Extra{kKScale, {1}, {0}}, Extra{kKScale, {1}, {-1}},
        Extra{kKScale, {1}, {nan}}, Extra{kKScale, {1}, {1e-40f}}}) {
    const absl::Status status = Load(Write({extra}), "fp8").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_NE(std::string(status.message()).find(kKScale), std::string::npos) << status;
  }
}

TEST(KvCacheDTypeTest, APoolOfSoManyBytesHoldsMoreBlocksOfASmallerType) {
  std::map<std::string, ServedModel> served;
  for (const char* dtype : {"auto", "bf16", "fp8"}) {
    ServedModelOptions options;
    options.path = TestDataPath("tiny_models/llama");
    options.backend = {.kind = "cpu", .num_threads = 1, .kv_cache_dtype = dtype};
    options.engine.context_length = 64;
    options.engine.max_sequences = 64;
    options.kv_cache_bytes = 1 << 18;
    absl::StatusOr<ServedModel> model = LoadServedModel(options);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_LE(model->kv_cache_bytes, options.kv_cache_bytes);
    served[dtype] = *std::move(model);
  }
  const int32_t floats = served["auto"].engine.num_blocks;
  EXPECT_EQ(served["bf16"].engine.num_blocks, 2 * floats);
  EXPECT_EQ(served["fp8"].engine.num_blocks, 4 * floats);
  EXPECT_EQ(served["fp8"].kv_cache_bytes, served["auto"].kv_cache_bytes);
}

TEST(KvCacheDTypeTest, ThePlanCountsHalfTheBytesForFP8) {
  const absl::StatusOr<Checkpoint> checkpoint = OpenCheckpoint(TestDataPath("tiny_models/llama"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const absl::StatusOr<MemoryPlan> bfloat16 = MakeMemoryPlan(*checkpoint, {});
  const absl::StatusOr<MemoryPlan> fp8 = MakeMemoryPlan(*checkpoint, {.kv_dtype = DType::kF8E4M3});
  ASSERT_TRUE(bfloat16.ok() && fp8.ok());
  EXPECT_EQ(2 * fp8->token, bfloat16->token);
  EXPECT_EQ(2 * fp8->context, bfloat16->context);
  EXPECT_EQ(2 * fp8->pool, bfloat16->pool);
  EXPECT_EQ(fp8->without_pool(), bfloat16->without_pool());
}

}  // namespace
}  // namespace flashquant
