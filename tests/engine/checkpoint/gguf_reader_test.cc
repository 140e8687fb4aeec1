// Import of a model: names, row order, block types, config, tokenizer files.
#include "engine/checkpoint/gguf_reader.h"

#include <cmath>
#include <cstdlib>
#include <random>

#include "engine/checkpoint/gguf_blocks.h"
#include "kernels/base/bfloat16.h"
#include "tests/engine/checkpoint/gguf_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

auto IsDataLoss(const std::string& text) {
  return StatusIs(absl::StatusCode::kDataLoss, HasSubstr(text));
}
auto IsUnimplemented(const std::string& text) {
  return StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(text));
}

class GgufReaderTest : public testing::Test {
 protected:
  absl::StatusOr<Checkpoint> Open(const GgufBuilder& gguf) {
    return OpenGguf(dir_.Write("m.gguf", gguf.Build()));
  }
  std::vector<float> ReadFloats(const TensorSource& tensors, std::string_view name) {
    const TensorInfo* const info = tensors.Find(name);
    EXPECT_NE(info, nullptr) << name;
    std::vector<float> values(static_cast<size_t>(info->num_bytes / DTypeBytes(info->dtype)));
    FQ_EXPECT_OK(tensors.ReadRowsAsFloat(*info, 0, info->num_rows(), values.data()));
    return values;
  }
  TempDir dir_;
};

TEST_F(GgufReaderTest, GivesHuggingFaceNamesAndShapes) {
  const auto checkpoint = Open(TinyLlamaGguf());
  FQ_ASSERT_OK(checkpoint);
  std::vector<std::string> names;
  for (const TensorInfo& tensor : checkpoint->tensors->tensors()) names.push_back(tensor.name);
  EXPECT_EQ(
      names,
      (std::vector<std::string>{
          "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
          "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.gate_proj.weight",
          "model.layers.0.mlp.up_proj.weight", "model.layers.0.post_attention_layernorm.weight",
          "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.o_proj.weight",
          "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.v_proj.weight",
          "model.norm.weight"}));
  EXPECT_EQ(checkpoint->tensors->Find("model.layers.0.mlp.down_proj.weight")->shape,
            (std::vector<int64_t>{8, 16}));
  const std::vector<float> v =
      ReadFloats(*checkpoint->tensors, "model.layers.0.self_attn.v_proj.weight");
  for (size_t i = 0; i < v.size(); ++i) EXPECT_EQ(v[i], 3000 + static_cast<float>(i));
}

// The converter writes row 2 i + j of a head from row i + j * head_dim / 2 (i < head_dim / 2).
TEST_F(GgufReaderTest, RowOrderOfQueryAndKeyIsThatOfHuggingFace) {
  const auto checkpoint = Open(TinyLlamaGguf());
  FQ_ASSERT_OK(checkpoint);
  const std::vector<float> q =
      ReadFloats(*checkpoint->tensors, "model.layers.0.self_attn.q_proj.weight");
  const std::vector<size_t> file_row = {0, 2, 1, 3, 4, 6, 5, 7};  // 2 heads of 4
  for (size_t row = 0; row < 8; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      EXPECT_EQ(q[row * 8 + column], 1000 + static_cast<float>(file_row[row] * 8 + column));
    }
  }
  const std::vector<float> k =
      ReadFloats(*checkpoint->tensors, "model.layers.0.self_attn.k_proj.weight");
  for (size_t row = 0; row < 4; ++row) {
    EXPECT_EQ(k[row * 8], 2000 + static_cast<float>(file_row[row] * 8));
  }
  std::vector<float> two_rows(16);
  const TensorInfo* const info =
      checkpoint->tensors->Find("model.layers.0.self_attn.q_proj.weight");
  FQ_ASSERT_OK(checkpoint->tensors->ReadRowsAsFloat(*info, 5, 2, two_rows.data()));
  EXPECT_EQ(two_rows[0], 1000 + 6 * 8);
  EXPECT_EQ(two_rows[8], 1000 + 5 * 8);
}

TEST_F(GgufReaderTest, ConfigComesFromTheMetadata) {
  const auto checkpoint = Open(TinyLlamaGguf());
  FQ_ASSERT_OK(checkpoint);
  const nlohmann::json& config = checkpoint->config;
  EXPECT_EQ(config["architectures"][0], "LlamaForCausalLM");
  EXPECT_EQ(config["hidden_size"], 8);
  EXPECT_EQ(config["intermediate_size"], 16);
  EXPECT_EQ(config["num_hidden_layers"], 1);
  EXPECT_EQ(config["num_attention_heads"], 2);
  EXPECT_EQ(config["num_key_value_heads"], 1);
  EXPECT_EQ(config["head_dim"], 4);
  EXPECT_EQ(config["max_position_embeddings"], 64);
  EXPECT_EQ(config["vocab_size"], 5);
  EXPECT_EQ(config["rms_norm_eps"], 1e-5);
  EXPECT_EQ(config["rope_theta"], 10000.0);
  EXPECT_TRUE(config["rope_scaling"].is_null());
  EXPECT_EQ(config["tie_word_embeddings"], true);
  EXPECT_EQ(config["attention_bias"], false);
  EXPECT_EQ(config["bos_token_id"], 1);
  EXPECT_EQ(config["eos_token_id"], 2);
  EXPECT_EQ(checkpoint->generation_config["eos_token_id"], 2);
}

TEST_F(GgufReaderTest, OutputTensorUntiesTheHead) {
  GgufBuilder gguf = TinyLlamaGguf();
  gguf.AddF32("output.weight", {8, 5}, std::vector<float>(40));
  const auto checkpoint = Open(gguf);
  FQ_ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->config["tie_word_embeddings"], false);
  EXPECT_NE(checkpoint->tensors->Find("lm_head.weight"), nullptr);
}

TEST_F(GgufReaderTest, LinearRopeScalingIsTaken) {
  const auto checkpoint = Open(TinyLlamaGguf()
                                   .AddString("llama.rope.scaling.type", "linear")
                                   .AddFloat("llama.rope.scaling.factor", 4.0f));
  FQ_ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->config["rope_scaling"]["rope_type"], "linear");
  EXPECT_EQ(checkpoint->config["rope_scaling"]["factor"], 4.0);
  EXPECT_THAT(Open(TinyLlamaGguf().AddString("llama.rope.scaling.type", "yarn")),
              IsUnimplemented("llama.rope.scaling.type: yarn"));
}

// Divisors computed here from the published rule: head dimension 8, theta 500000, factor 8,
// original context 64: wavelengths 6.28, 167, 4443, 118145; limits 16 and 64.
TEST_F(GgufReaderTest, Llama3RopeScalingIsRecognisedByItsDivisors) {
  const auto with_divisors = [](const std::vector<float>& divisors) {
    GgufBuilder gguf;
    gguf.AddString("general.architecture", "llama")
        .AddInt("llama.block_count", 1)
        .AddInt("llama.context_length", 131'072)
        .AddInt("llama.embedding_length", 8)
        .AddInt("llama.feed_forward_length", 16)
        .AddInt("llama.attention.head_count", 1)
        .AddFloat("llama.attention.layer_norm_rms_epsilon", 1e-5f)
        .AddFloat("llama.rope.freq_base", 500'000.0f)
        .AddF32("token_embd.weight", {8, 5}, std::vector<float>(40))
        .AddF32("rope_freqs.weight", {divisors.size()}, divisors);
    return gguf;
  };
  // Original context 8192: limits 2048 and 8192; only 4443 lies between.
  const double wavelength = 2 * std::acos(-1.0) * std::pow(500'000.0, 4.0 / 8.0);
  const double smooth = (8192 / wavelength - 1) / 3;
  const auto middle = static_cast<float>(1 / ((1 - smooth) / 8 + smooth));
  const auto checkpoint = Open(with_divisors({1, 1, middle, 8}));
  FQ_ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->config["rope_scaling"]["rope_type"], "llama3");
  EXPECT_EQ(checkpoint->config["rope_scaling"]["factor"], 8.0);
  EXPECT_EQ(checkpoint->config["rope_scaling"]["original_max_position_embeddings"], 8192);
  EXPECT_EQ(checkpoint->tensors->Find("rope_freqs.weight"), nullptr);
  EXPECT_THAT(Open(with_divisors({1, 2, 3, 4})), IsUnimplemented("not the scaling of Llama 3"));
  EXPECT_THAT(Open(with_divisors({1, 1, 8, NAN})), IsDataLoss("factor out of range"));
  EXPECT_THAT(Open(with_divisors({1, 8})), IsDataLoss("must be F32 [4]"));
}

// M12
TEST_F(GgufReaderTest, HyperparametersHaveRanges) {
  const auto with = [](const char* key, uint32_t value) {
    GgufBuilder gguf;
    gguf.AddString("general.architecture", "llama");
    for (const auto& [name, good] : std::initializer_list<std::pair<const char*, uint32_t>>{
             {"llama.block_count", 1},
             {"llama.context_length", 64},
             {"llama.embedding_length", 8},
             {"llama.feed_forward_length", 16},
             {"llama.attention.head_count", 2}}) {
      gguf.AddInt(name, std::string_view(key) == name ? value : good);
    }
    gguf.AddFloat("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf.AddF32("token_embd.weight", {8, 5}, std::vector<float>(40));
    return gguf;
  };
  FQ_EXPECT_OK(Open(with("", 0)));
  for (const char* key : {"llama.block_count", "llama.context_length", "llama.embedding_length",
                          "llama.feed_forward_length", "llama.attention.head_count"}) {
    EXPECT_THAT(Open(with(key, 0)), IsDataLoss(std::string(key) + ": out of range"));
    EXPECT_THAT(Open(with(key, 0x7fffffff)), IsDataLoss(std::string(key) + ": out of range"));
  }
  EXPECT_THAT(Open(with("llama.attention.head_count", 3)), IsDataLoss("must divide the width"));
  EXPECT_THAT(Open(with("llama.attention.head_count", 8)), IsDataLoss("must be even"));
}

TEST_F(GgufReaderTest, WhatIsNoLlamaIsUnimplemented) {
  EXPECT_THAT(Open(GgufBuilder().AddString("general.architecture", "qwen2")),
              IsUnimplemented("general.architecture: qwen2"));
  EXPECT_THAT(Open(GgufBuilder()), IsDataLoss("general.architecture: missing"));
  for (const char* name :
       {"blk.0.attn_q_norm.weight", "blk.1.attn_q.weight", "blk.00.attn_q.weight",
        "blk.-1.attn_q.weight", "blk.9999999999.attn_q.weight", "blk.attn_q.weight",
        "blk.0.attn_norm.bias", "blk.0.attn_q.scale", "blk.0.", "v.weight"}) {
    EXPECT_THAT(Open(TinyLlamaGguf().AddF32(name, {8}, std::vector<float>(8))),
                IsUnimplemented("not part of a Llama model"))
        << name;
  }
}

TEST_F(GgufReaderTest, PathDecidesByContentWhichReaderOpensIt) {
  FQ_EXPECT_OK(CheckpointFromPath(dir_.Write("model.gguf", TinyLlamaGguf().Build())));
  FQ_EXPECT_OK(CheckpointFromPath(dir_.Write("model", TinyLlamaGguf().Build())));
  FQ_EXPECT_OK(CheckpointFromPath(TestDataPath("tiny_models/llama")));
  EXPECT_THAT(CheckpointFromPath(dir_.Write("bad.gguf", "text")), IsDataLoss("wrong magic"));
  EXPECT_THAT(CheckpointFromPath(dir_.File("none.gguf")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none.gguf")));
  EXPECT_THAT(CheckpointFromPath(dir_.Write("text", "hello")), IsDataLoss("not a model folder"));
}

// Straight from the public definition of each type, in double.
std::vector<double> ReferenceWeights(GgufType type, const std::string& bytes) {
  const auto byte = [&](size_t i) { return static_cast<int>(static_cast<uint8_t>(bytes[i])); };
  const auto half = [&](size_t i) {
    const int bits = byte(i) | byte(i + 1) << 8;
    const int exponent = bits >> 10 & 31;
    const double mantissa = bits & 1023;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
  };
  std::vector<double> weights;
  if (type == GgufType::kQ8_0) {
    for (size_t i = 0; i < 32; ++i) {
      weights.push_back(half(0) * (byte(2 + i) < 128 ? byte(2 + i) : byte(2 + i) - 256));
    }
  } else if (type == GgufType::kQ4_0) {
    for (size_t i = 0; i < 32; ++i) {
      const int nibble = i < 16 ? byte(2 + i) % 16 : byte(2 + i - 16) / 16;
      weights.push_back(half(0) * (nibble - 8));
    }
  } else if (type == GgufType::kQ4_1) {
    for (size_t i = 0; i < 32; ++i) {
      const int nibble = i < 16 ? byte(4 + i) % 16 : byte(4 + i - 16) / 16;
      weights.push_back(half(0) * nibble + half(2));
    }
  } else {
    for (size_t w = 0; w < 256; ++w) {
      const size_t half_block = w / 128;
      const size_t quarter = w % 128 / 32;
      const size_t l = w % 32;
      const int low = byte(64 * half_block + 32 * (quarter % 2) + l);
      const int high = byte(128 + 32 * half_block + l);
      const int code = (quarter < 2 ? low % 16 : low / 16) + 16 * (high >> (2 * quarter) & 3) - 32;
      const int scale = byte(192 + 8 * half_block + 2 * quarter + l / 16);
      weights.push_back(half(208) * (scale < 128 ? scale : scale - 256) * code);
    }
  }
  return weights;
}

TEST(GgufBlocksTest, WeightsAreThoseOfTheDefinition) {
  std::mt19937 random(11);
  for (const GgufType type : {GgufType::kQ8_0, GgufType::kQ4_0, GgufType::kQ4_1, GgufType::kQ6K}) {
    const GgufBlock block = *GgufBlockOf(type);
    for (int round = 0; round < 50; ++round) {
      std::string bytes;
      for (int64_t i = 0; i < block.num_bytes; ++i) bytes += static_cast<char>(random() & 0xff);
      // Finite half numbers, the first a subnormal one.
      const size_t d = type == GgufType::kQ6K ? 208 : 0;
      bytes[d + 1] = static_cast<char>(round == 0 ? 0x02 : bytes[d + 1] & 0xbf);
      if (type == GgufType::kQ4_1) bytes[3] = static_cast<char>(bytes[3] & 0xbf);
      std::vector<float> weights(static_cast<size_t>(block.num_weights));
      const auto* const data = reinterpret_cast<const uint8_t*>(bytes.data());
      FQ_ASSERT_OK(DequantizeGgufBlocks(type, std::span(data, bytes.size()), weights.data()));
      const std::vector<double> expected = ReferenceWeights(type, bytes);
      for (size_t i = 0; i < weights.size(); ++i) {
        // Q4_1 rounds twice, the others once: 2^-23 of the larger term bounds both.
        const double scale = std::max(std::abs(expected[i]), 1e-30) +
                             (type == GgufType::kQ4_1 ? std::abs(expected[0]) + 32768 : 0);
        EXPECT_NEAR(weights[i], expected[i], scale * std::ldexp(1.0, -23)) << i;
      }
    }
  }
}

TEST(GgufBlocksTest, BlockScaleThatIsNotFiniteIsRefused) {
  for (const GgufType type : {GgufType::kQ8_0, GgufType::kQ4_0, GgufType::kQ4_1, GgufType::kQ6K}) {
    const GgufBlock block = *GgufBlockOf(type);
    std::vector<uint8_t> bytes(static_cast<size_t>(block.num_bytes), 1);
    std::vector<float> weights(static_cast<size_t>(block.num_weights));
    bytes[type == GgufType::kQ6K ? 209 : 1] = 0x7c;
    EXPECT_THAT(DequantizeGgufBlocks(type, bytes, weights.data()), IsDataLoss("not finite"));
    bytes[type == GgufType::kQ6K ? 209 : 1] = 0x01;
    FQ_EXPECT_OK(DequantizeGgufBlocks(type, bytes, weights.data()));
    bytes.pop_back();
    EXPECT_FALSE(DequantizeGgufBlocks(type, bytes, weights.data()).ok());
  }
}

TEST_F(GgufReaderTest, StoredTypesAreDeliveredWithTheirRows) {
  GgufBuilder gguf;
  gguf.AddString("general.architecture", "llama")
      .AddInt("llama.block_count", 1)
      .AddInt("llama.context_length", 64)
      .AddInt("llama.embedding_length", 32)
      .AddInt("llama.feed_forward_length", 16)
      .AddInt("llama.attention.head_count", 1)
      .AddFloat("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  // Row r: scale 1, all codes r + 1.
  std::string rows;
  for (char r = 0; r < 3; ++r) rows += LittleEndian(0x3c00, 2) + std::string(32, char(r + 1));
  gguf.AddTensor("token_embd.weight", {32, 3}, 8, rows);
  std::string halves;
  std::string brains;
  for (int i = 0; i < 64; ++i) {
    halves += LittleEndian(ToHalf(static_cast<float>(i)).bits, 2);
    brains += LittleEndian(ToBFloat16(static_cast<float>(-i)).bits, 2);
  }
  gguf.AddTensor("blk.0.attn_v.weight", {32, 2}, 1, halves);
  gguf.AddTensor("blk.0.attn_output.weight", {32, 2}, 30, brains);
  const auto checkpoint = Open(gguf);
  FQ_ASSERT_OK(checkpoint);
  const TensorSource& tensors = *checkpoint->tensors;
  const TensorInfo* const embedding = tensors.Find("model.embed_tokens.weight");
  EXPECT_EQ(embedding->dtype, DType::kF32);
  EXPECT_EQ(embedding->num_bytes, 3 * 32 * 4);
  std::vector<float> row(32);
  FQ_ASSERT_OK(tensors.ReadRowsAsFloat(*embedding, 1, 1, row.data()));
  EXPECT_EQ(row, std::vector<float>(32, 2.0f));
  EXPECT_EQ(tensors.Find("model.layers.0.self_attn.v_proj.weight")->dtype, DType::kF16);
  EXPECT_EQ(tensors.Find("model.layers.0.self_attn.o_proj.weight")->dtype, DType::kBF16);
  EXPECT_EQ(ReadFloats(tensors, "model.layers.0.self_attn.v_proj.weight")[33], 33.0f);
  EXPECT_EQ(ReadFloats(tensors, "model.layers.0.self_attn.o_proj.weight")[33], -33.0f);
}

// A real model, when FQ_SMOLLM2_GGUF names the file (SmolLM2-135M-Instruct, Q4_1).
TEST_F(GgufReaderTest, RealModelHasItsTensorsAndTokenizer) {
  const char* const path = std::getenv("FQ_SMOLLM2_GGUF");
  if (path == nullptr) GTEST_SKIP() << "needs FQ_SMOLLM2_GGUF";
  FQ_SKIP_WITHOUT_SHARED_DATA("data/tokenizers/smollm2/tokenizer.json");
  const auto checkpoint = CheckpointFromPath(path);
  FQ_ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->tensors->tensors().size(), 272u);
  const std::vector<float> embedding =
      ReadFloats(*checkpoint->tensors, "model.embed_tokens.weight");
  double squares = 0;
  for (const float value : embedding) squares += static_cast<double>(value) * value;
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(embedding.size())), 0.13, 0.02);
  const auto norm = ReadFloats(*checkpoint->tensors, "model.norm.weight");
  for (const float value : norm) EXPECT_LT(std::abs(value), 10);

  auto writer = CheckpointWriter::Create(dir_.File("out"));
  FQ_ASSERT_OK(writer);
  FQ_ASSERT_OK(CopyTokenizerFiles(path, writer->get()));
  const auto ours = nlohmann::json::parse(ReadAll((*writer)->partial_dir() + "/tokenizer.json"));
  const auto theirs =
      nlohmann::json::parse(ReadAll(SharedDataPath("data/tokenizers/smollm2/tokenizer.json")));
  EXPECT_EQ(ours, theirs);
}

}  // namespace
}  // namespace flashquant
