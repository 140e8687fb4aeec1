// config.json as bytes from outside: each dimension has a range, each unknown feature is refused by
// name.
#include "engine/model/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace flashquant {
namespace {

using testing::HasSubstr;

nlohmann::json LlamaConfig() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"vocab_size", 512},
          {"hidden_size", 128},
          {"intermediate_size", 256},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"max_position_embeddings", 256},
          {"rms_norm_eps", 1e-6}};
}

absl::StatusOr<ModelConfig> Parse(const nlohmann::json& config) {
  Checkpoint checkpoint;
  checkpoint.config = config;
  return ParseModelConfig(checkpoint);
}

void ExpectRefused(const std::string& key, const nlohmann::json& value, absl::StatusCode code,
                   const std::string& text) {
  nlohmann::json config = LlamaConfig();
  config[key] = value;
  const absl::StatusOr<ModelConfig> parsed = Parse(config);
  EXPECT_EQ(parsed.status().code(), code) << key << " = " << value;
  EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(text));
}

TEST(ModelConfigTest, DerivesTheHeadDimensionAndTakesDefaults) {
  const absl::StatusOr<ModelConfig> config = Parse(LlamaConfig());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->head_dim, 32);
  EXPECT_EQ(config->qkv_size(), (4 + 2 * 2) * 32);
  EXPECT_EQ(config->rope.type, RopeType::kDefault);
  EXPECT_EQ(config->rope.theta, 10000.0);
  EXPECT_FALSE(config->tie_word_embeddings);
  EXPECT_FALSE(config->quantization.has_value());
}

TEST(ModelConfigTest, ReadsTheOldAndTheNewRopeForm) {
  const nlohmann::json scaling = {{"rope_type", "llama3"},
                                  {"factor", 8.0},
                                  {"low_freq_factor", 1.0},
                                  {"high_freq_factor", 4.0},
                                  {"original_max_position_embeddings", 64}};
  nlohmann::json old_form = LlamaConfig();
  old_form["rope_theta"] = 500000.0;
  old_form["rope_scaling"] = scaling;
  nlohmann::json new_form = LlamaConfig();
  new_form["rope_parameters"] = scaling;
  new_form["rope_parameters"]["rope_theta"] = 500000.0;
  for (const nlohmann::json& form : {old_form, new_form}) {
    const absl::StatusOr<ModelConfig> config = Parse(form);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->rope.type, RopeType::kLlama3);
    EXPECT_EQ(config->rope.theta, 500000.0);
    EXPECT_EQ(config->rope.factor, 8.0);
    EXPECT_EQ(config->rope.original_max_position, 64);
  }
}

// M12
TEST(ModelConfigTest, RefusesImpossibleDimensionsNamingTheKey) {
  const absl::StatusCode data_loss = absl::StatusCode::kDataLoss;
  ExpectRefused("num_hidden_layers", 0, data_loss, "num_hidden_layers");
  ExpectRefused("num_hidden_layers", 1000000, data_loss, "num_hidden_layers");
  ExpectRefused("num_attention_heads", 3, data_loss, "num_attention_heads");
  ExpectRefused("num_key_value_heads", 8, data_loss, "num_key_value_heads");
  ExpectRefused("num_key_value_heads", 3, data_loss, "num_key_value_heads");
  ExpectRefused("vocab_size", 0, data_loss, "vocab_size");
  ExpectRefused("vocab_size", -1, data_loss, "vocab_size");
  ExpectRefused("vocab_size", 1.5, data_loss, "vocab_size");
  ExpectRefused("max_position_embeddings", 0, data_loss, "max_position_embeddings");
  ExpectRefused("hidden_size", int64_t{1} << 40, data_loss, "hidden_size");
  ExpectRefused("head_dim", 33, data_loss, "head_dim");
  ExpectRefused("rope_theta", "nan", data_loss, "rope_theta");
  ExpectRefused("rope_theta", 0.0, data_loss, "rope_theta");
  ExpectRefused("rms_norm_eps", -1.0, data_loss, "rms_norm_eps");
}

TEST(ModelConfigTest, RefusesAMissingDimension) {
  nlohmann::json config = LlamaConfig();
  config.erase("hidden_size");
  const absl::StatusOr<ModelConfig> parsed = Parse(config);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("hidden_size"));
}

TEST(ModelConfigTest, RefusesUnknownFeaturesByName) {
  const absl::StatusCode unimplemented = absl::StatusCode::kUnimplemented;
  ExpectRefused("architectures", {"MambaForCausalLM"}, unimplemented, "MambaForCausalLM");
  ExpectRefused("hidden_act", "gelu", unimplemented, "gelu");
  ExpectRefused("rope_scaling", {{"type", "yarn"}, {"factor", 2.0}}, unimplemented, "yarn");
}

}  // namespace
}  // namespace flashquant
