// Whole models of odd sizes and of every family, as they are and quantized, against a decoder in
// double precision on the same (dequantized) weights: what the engine adds is rounding only.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/model/loaded_model.h"
#include "engine/model/text_scorer.h"
#include "engine/quantize/checkpoint_quantizer.h"
#include "engine/quantize/model_calibration.h"
#include "gtest/gtest.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/support/reference_decoder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

constexpr double kTolerance = 0.003;  // of logits, whose magnitude is around 5

std::vector<int32_t> SomeTokens(size_t count, int32_t vocab_size) {
  std::mt19937 random(17);
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(vocab_size)));
  }
  return tokens;
}

// Every logit of the engine on the CPU against the oracle's.
void ExpectOracle(const std::string& path) {
  const auto checkpoint = OpenCheckpoint(path);
  FQ_ASSERT_OK(checkpoint);
  const ReferenceDecoder oracle(*checkpoint);
  auto loaded = LoadModel(path, 64, {.kind = "cpu", .num_threads = 2}, nullptr);
  FQ_ASSERT_OK(loaded);
  const auto scorer = TextScorer::Create(loaded->model.get(), loaded->backend.get(), 64);
  FQ_ASSERT_OK(scorer);
  const std::vector<int32_t> tokens = SomeTokens(40, loaded->config.vocab_size);
  const std::vector<std::vector<double>> expected = oracle.Logits(tokens);
  double largest = 0;
  double spread = 0;
  FQ_ASSERT_OK((*scorer)->VisitLogits(tokens, [&](int32_t position, std::span<const float> logits) {
    const std::vector<double>& row = expected[static_cast<size_t>(position)];
    ASSERT_EQ(row.size(), logits.size());
    for (size_t id = 0; id < row.size(); ++id) {
      largest = std::max(largest, std::fabs(static_cast<double>(logits[id]) - row[id]));
      spread = std::max(spread, std::fabs(row[id]));
    }
  }));
  EXPECT_LT(largest, kTolerance);
  EXPECT_GT(spread, 1.0) << "the logits say something";
}

struct OddModel {
  std::string name;
  int64_t heads = 6;
  int64_t kv_heads = 2;
  int64_t head_dim = 16;
  nlohmann::json rope = {{"rope_type", "default"}, {"rope_theta", 10000.0}};
};

// Vocabulary 1000, hidden 96, FFN 200: none a multiple of 128, 200 not even of 32.
void WriteOddModel(const OddModel& model, const std::string& path) {
  constexpr int64_t kVocab = 1000;
  constexpr int64_t kHidden = 96;
  constexpr int64_t kFfn = 200;
  auto writer = CheckpointWriter::Create(path);
  FQ_ASSERT_OK(writer);
  std::mt19937 random(9);
  std::student_t_distribution<float> heavy(5.0f);
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, float mean,
                       float spread) {
    int64_t count = 1;
    for (const int64_t dim : shape) count *= dim;
    std::vector<uint8_t> bytes;
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t bits = ToBFloat16(mean + spread * heavy(random)).bits;
      bytes.push_back(static_cast<uint8_t>(bits & 0xff));
      bytes.push_back(static_cast<uint8_t>(bits >> 8));
    }
    FQ_ASSERT_OK((*writer)->AddTensor(name, DType::kBF16, shape, bytes));
  };
  add("model.embed_tokens.weight", {kVocab, kHidden}, 0, 0.5f);
  add("model.norm.weight", {kHidden}, 1, 0.1f);
  add("lm_head.weight", {kVocab, kHidden}, 0, 0.1f);
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    add(layer + "input_layernorm.weight", {kHidden}, 1, 0.1f);
    add(layer + "post_attention_layernorm.weight", {kHidden}, 1, 0.1f);
    add(layer + "self_attn.q_proj.weight", {model.heads * model.head_dim, kHidden}, 0, 0.1f);
    add(layer + "self_attn.k_proj.weight", {model.kv_heads * model.head_dim, kHidden}, 0, 0.1f);
    add(layer + "self_attn.v_proj.weight", {model.kv_heads * model.head_dim, kHidden}, 0, 0.1f);
    add(layer + "self_attn.o_proj.weight", {kHidden, model.heads * model.head_dim}, 0, 0.1f);
    add(layer + "mlp.gate_proj.weight", {kFfn, kHidden}, 0, 0.1f);
    add(layer + "mlp.up_proj.weight", {kFfn, kHidden}, 0, 0.1f);
    add(layer + "mlp.down_proj.weight", {kHidden, kFfn}, 0, 0.1f);
  }
  FQ_ASSERT_OK((*writer)->Finish({{"architectures", {"LlamaForCausalLM"}},
                                  {"model_type", "llama"},
                                  {"hidden_act", "silu"},
                                  {"vocab_size", kVocab},
                                  {"hidden_size", kHidden},
                                  {"intermediate_size", kFfn},
                                  {"num_hidden_layers", 2},
                                  {"num_attention_heads", model.heads},
                                  {"num_key_value_heads", model.kv_heads},
                                  {"head_dim", model.head_dim},
                                  {"max_position_embeddings", 256},
                                  {"rms_norm_eps", 1e-5},
                                  {"rope_parameters", model.rope},
                                  {"tie_word_embeddings", false}}));
}

class OddModelTest : public testing::TestWithParam<OddModel> {};

TEST_P(OddModelTest, BFloat16AndEveryWayOfQuantizingEqualTheOracle) {
  const WorkDir dir;
  WriteOddModel(GetParam(), dir / "in");
  ExpectOracle(dir / "in");
  const auto checkpoint = OpenCheckpoint(dir / "in");
  FQ_ASSERT_OK(checkpoint);
  const std::vector<int32_t> tokens = SomeTokens(512, 1000);
  int number = 0;
  for (const int64_t group_size : {int64_t{32}, int64_t{-1}}) {
    for (const QuantizeMethod method : {QuantizeMethod::kRtn, QuantizeMethod::kGptq}) {
      QuantizeOptions options;
      options.group_size = group_size;
      options.method = method;
      options.density = 0.03;
      options.symmetric = group_size == -1;
      options.embedding = TableFormat::kInt8;
      options.lm_head = method == QuantizeMethod::kGptq ? TableFormat::kInt4 : TableFormat::kInt8;
      const auto calibration =
          ModelCalibration::Create(*checkpoint, tokens, {.text_path = "text", .context = 64});
      FQ_ASSERT_OK(calibration);
      const std::string out = dir / ("out" + std::to_string(number++));
      const auto report =
          QuantizeCheckpoint(*checkpoint, out, options, nullptr,
                             method == QuantizeMethod::kGptq ? calibration->get() : nullptr);
      FQ_ASSERT_OK(report);
      EXPECT_GT(report->Total().stored_density(), 0.02);
      SCOPED_TRACE(out);
      ExpectOracle(out);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, OddModelTest,
    testing::Values(
        OddModel{.name = "head_dim_16"},
        OddModel{.name = "head_dim_48", .heads = 2, .kv_heads = 1, .head_dim = 48},
        OddModel{.name = "yarn",
                 .rope = {{"rope_type", "yarn"},
                          {"rope_theta", 10000.0},
                          {"factor", 4.0},
                          {"original_max_position_embeddings", 64}}},
        OddModel{.name = "linear",
                 .rope = {{"rope_type", "linear"}, {"rope_theta", 10000.0}, {"factor", 2.0}}}),
    [](const auto& param_info) { return param_info.param.name; });

class QuantizedTinyModelTest : public testing::TestWithParam<const char*> {};

TEST_P(QuantizedTinyModelTest, EqualsTheOracleOnItsDequantizedWeights) {
  const WorkDir dir;
  const auto checkpoint = OpenCheckpoint(TestDataPath(std::string("tiny_models/") + GetParam()));
  FQ_ASSERT_OK(checkpoint);
  for (const bool symmetric : {false, true}) {
    QuantizeOptions options;
    options.group_size = symmetric ? 32 : 128;
    options.symmetric = symmetric;
    options.density = 0.02;
    const std::string out = dir / (symmetric ? "symmetric" : "asymmetric");
    FQ_ASSERT_OK(QuantizeCheckpoint(*checkpoint, out, options, nullptr));
    SCOPED_TRACE(out);
    ExpectOracle(out);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, QuantizedTinyModelTest,
                         testing::Values("llama", "llama3-rope", "mistral-window", "opt", "qwen2",
                                         "qwen3"),
                         [](const auto& param_info) {
                           std::string name = param_info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// YaRN (Peng et al. 2023, 3.2): pairs that turn more than beta times within the trained context
// stay, those that turn less than alpha times are divided by the factor, those between lie between;
// all attention is sharpened by 0.1 ln(factor) + 1. Here alpha 1, beta 32.
TEST(ReferenceDecoderTest, YarnIsThePapersAtBothEndsAndRisesBetween) {
  const nlohmann::json config = {{"head_dim", 128},
                                 {"rope_parameters",
                                  {{"rope_type", "yarn"},
                                   {"rope_theta", 10000.0},
                                   {"factor", 8.0},
                                   {"original_max_position_embeddings", 4096}}}};
  double scale = 0;
  const std::vector<double> yarn = ReferenceDecoder::RopeFrequencies(config, &scale);
  EXPECT_DOUBLE_EQ(scale, 1.2079441541679836);
  double before = 2;
  for (size_t i = 0; i < yarn.size(); ++i) {
    const double plain = std::pow(10000.0, -static_cast<double>(i) / 64);
    const double turns = 4096 * plain / (2 * M_PI);
    const double share = yarn[i] / plain;
    if (turns > 37) {
      EXPECT_DOUBLE_EQ(share, 1.0) << i;
    }
    if (turns < 0.87) {
      EXPECT_DOUBLE_EQ(share, 1.0 / 8) << i;
    }
    if (turns < 27 && turns > 1) {
      EXPECT_LT(share, before) << i;
    }
    before = share;
  }
}

}  // namespace
}  // namespace flashquant
