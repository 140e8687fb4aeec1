// config.json as bytes from outside: each dimension has a range, each unknown feature is refused by
// name.
#include "engine/model/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
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
  ExpectRefused("rope_scaling", {{"type", "longrope"}, {"factor", 2.0}}, unimplemented, "longrope");
}

nlohmann::json With(nlohmann::json config, const nlohmann::json& changes) {
  config.update(changes);
  return config;
}

TEST(ModelConfigTest, FamiliesHaveTheBiasesAndNormsOfTheirModels) {
  const auto parse = [](const char* name, const nlohmann::json& changes = {}) {
    nlohmann::json config =
        With(LlamaConfig(), changes.is_null() ? nlohmann::json::object() : changes);
    config["architectures"] = {name};
    const absl::StatusOr<ModelConfig> parsed = Parse(config);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return *parsed;
  };
  EXPECT_FALSE(parse("LlamaForCausalLM").attention_bias);
  EXPECT_TRUE(parse("LlamaForCausalLM", {{"attention_bias", true}}).attention_output_bias);
  const ModelConfig qwen2 = parse("Qwen2ForCausalLM");
  EXPECT_TRUE(qwen2.attention_bias);
  EXPECT_FALSE(qwen2.attention_output_bias);
  EXPECT_FALSE(qwen2.head_norms);
  EXPECT_TRUE(parse("Qwen3ForCausalLM").head_norms);
  EXPECT_FALSE(parse("Qwen3ForCausalLM").attention_bias);
}

TEST(ModelConfigTest, SlidingWindowsAreReadLayerByLayer) {
  const auto windows = [](const char* name, const nlohmann::json& changes) {
    nlohmann::json config = With(LlamaConfig(), changes);
    config["num_hidden_layers"] = 3;
    config["architectures"] = {name};
    const absl::StatusOr<ModelConfig> parsed = Parse(config);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    std::vector<int32_t> all;
    for (int32_t layer = 0; layer < 3; ++layer) all.push_back(parsed->sliding_window(layer));
    return all;
  };
  using Windows = std::vector<int32_t>;
  EXPECT_EQ(windows("MistralForCausalLM", {{"sliding_window", 16}}), Windows({16, 16, 16}));
  EXPECT_EQ(windows("MistralForCausalLM", {{"sliding_window", nullptr}}), Windows({0, 0, 0}));
  EXPECT_EQ(windows("Qwen2ForCausalLM", {{"sliding_window", 16}}), Windows({0, 0, 0}));
  EXPECT_EQ(
      windows("Qwen2ForCausalLM",
              {{"sliding_window", 16}, {"use_sliding_window", true}, {"max_window_layers", 2}}),
      Windows({0, 0, 16}));
  EXPECT_EQ(
      windows("Qwen3ForCausalLM",
              {{"sliding_window", 8},
               {"use_sliding_window", true},
               {"layer_types", {"sliding_attention", "full_attention", "sliding_attention"}}}),
      Windows({8, 0, 8}));
  ExpectRefused("partial_rotary_factor", 0.5, absl::StatusCode::kUnimplemented,
                "partial_rotary_factor");
}

TEST(ModelConfigTest, YarnStretchesTheContextAndScalesAttention) {
  const auto yarn = [](const nlohmann::json& scaling) {
    return Parse(With(LlamaConfig(), {{"rope_scaling", scaling}}));
  };
  auto config =
      yarn({{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 4096}});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->rope.type, RopeType::kYarn);
  EXPECT_EQ(config->max_position, 16384);
  EXPECT_NEAR(config->rope.attention_factor, 0.1 * std::log(4.0) + 1.0, 1e-12);
  config = yarn({{"rope_type", "yarn"},
                 {"factor", 40.0},
                 {"mscale", 1.0},
                 {"mscale_all_dim", 1.0},
                 {"original_max_position_embeddings", 4096}});
  EXPECT_EQ(config->rope.attention_factor, 1.0);
  config = yarn({{"rope_type", "yarn"}, {"factor", 4.0}, {"attention_factor", 0.5}});
  EXPECT_EQ(config->rope.attention_factor, 0.5);
  EXPECT_EQ(yarn({{"rope_type", "dynamic"}, {"factor", 2.0}})->rope.type, RopeType::kDynamic);
}

TEST(ModelConfigTest, OptVariantsThatWeDoNotRunAreRefusedByName) {
  nlohmann::json opt = LlamaConfig();
  opt["architectures"] = {"OPTForCausalLM"};
  opt["ffn_dim"] = 96;
  const absl::StatusOr<ModelConfig> config = Parse(opt);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, DecoderFamily::kOpt);
  EXPECT_EQ(config->intermediate_size, 96);
  EXPECT_TRUE(config->attention_bias && config->attention_output_bias && config->mlp_bias);
  EXPECT_TRUE(config->tie_word_embeddings || opt.contains("tie_word_embeddings"));
  const nlohmann::json refused = {{"do_layer_norm_before", false},
                                  {"enable_bias", false},
                                  {"_remove_final_layer_norm", true},
                                  {"word_embed_proj_dim", 512},
                                  {"activation_function", "gelu"}};
  for (const auto& [key, value] : refused.items()) {
    nlohmann::json changed = opt;
    changed[key] = value;
    const absl::Status status = Parse(changed).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << key;
    EXPECT_THAT(std::string(status.message()), HasSubstr(key));
  }
}

}  // namespace
}  // namespace flashquant
