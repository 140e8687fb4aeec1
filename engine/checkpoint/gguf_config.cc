#include "engine/checkpoint/gguf_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/llama3_rope.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxDimension = int64_t{1} << 24;
constexpr int64_t kControlToken = 3;  // tokenizer.ggml.token_type

// llama3's scaling as GGUF keeps it: a divisor per frequency.
std::vector<double> Llama3Divisors(double theta, int64_t head_dim,
                                   const Llama3RopeScaling& scaling) {
  std::vector<double> divisors;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const double exponent = 2 * static_cast<double>(i) / static_cast<double>(head_dim);
    const double frequency = std::pow(theta, -exponent);
    divisors.push_back(frequency / Llama3RopeFrequency(scaling, frequency));
  }
  return divisors;
}

// GGUF states the divisors alone, so the parameters are found by trying those that models use.
absl::StatusOr<nlohmann::json> RopeScalingFromDivisors(const GgufFile& gguf,
                                                       const GgufTensor& tensor, double theta,
                                                       int64_t head_dim) {
  if (tensor.type != GgufType::kF32 || tensor.shape.size() != 1 ||
      tensor.shape[0] != head_dim / 2) {
    return DataLossError("{}: tensor {}: must be F32 [{}]", gguf.path(), tensor.name, head_dim / 2);
  }
  std::vector<float> stored(static_cast<size_t>(head_dim / 2));
  FQ_RETURN_IF_ERROR(gguf.file().ReadAt(tensor.file_offset, tensor.num_bytes, stored.data()));
  const double factor = stored.empty() ? 0 : static_cast<double>(stored.back());
  if (!(factor >= 1 && factor <= 1024)) {
    return DataLossError("{}: tensor {}: factor out of range (limit 1..1024, got {})", gguf.path(),
                         tensor.name, factor);
  }
  for (int64_t original = 1024; original <= 131'072; original *= 2) {
    const Llama3RopeScaling scaling{.factor = factor,
                                    .original_max_position = static_cast<double>(original)};
    const std::vector<double> expected = Llama3Divisors(theta, head_dim, scaling);
    const bool equal =
        std::equal(stored.begin(), stored.end(), expected.begin(), [](float got, double want) {
          return std::abs(static_cast<double>(got) - want) <= 1e-3 * want;
        });
    if (!equal) continue;
    return nlohmann::json({{"rope_type", "llama3"},
                           {"factor", factor},
                           {"low_freq_factor", scaling.low_freq_factor},
                           {"high_freq_factor", scaling.high_freq_factor},
                           {"original_max_position_embeddings", original}});
  }
  return UnimplementedError("{}: tensor {}: not the scaling of Llama 3", gguf.path(), tensor.name);
}

// null when there is none.
absl::StatusOr<nlohmann::json> RopeScaling(const GgufFile& gguf, double theta, int64_t head_dim) {
  FQ_ASSIGN_OR_RETURN(const std::string type, gguf.GetStringOr("llama.rope.scaling.type", "none"));
  FQ_ASSIGN_OR_RETURN(const double old_scale,
                      gguf.GetDoubleOr("llama.rope.scale_linear", 1, 1, 1024));
  const GgufTensor* const divisors = gguf.FindTensor("rope_freqs.weight");
  if (type != "none" && type != "linear" && type != "llama3") {
    return UnimplementedError("{}: llama.rope.scaling.type: {} is not supported (none, linear are)",
                              gguf.path(), PrintableName(type));
  }
  if (divisors != nullptr) {
    if (type == "linear" || old_scale != 1) {
      return UnimplementedError("{}: rope_freqs.weight beside linear scaling", gguf.path());
    }
    return RopeScalingFromDivisors(gguf, *divisors, theta, head_dim);
  }
  double factor = old_scale;
  if (type == "linear") {
    FQ_ASSIGN_OR_RETURN(factor, gguf.GetDouble("llama.rope.scaling.factor", 1, 1024));
  }
  if (factor == 1) return nlohmann::json();
  return nlohmann::json({{"rope_type", "linear"}, {"factor", factor}});
}

absl::Status ReadDimensions(const GgufFile& gguf, nlohmann::json* config) {
  const std::array<std::pair<const char*, const char*>, 5> kKeys = {{
      {"llama.embedding_length", "hidden_size"},
      {"llama.feed_forward_length", "intermediate_size"},
      {"llama.block_count", "num_hidden_layers"},
      {"llama.attention.head_count", "num_attention_heads"},
      {"llama.context_length", "max_position_embeddings"},
  }};
  for (const auto& [key, name] : kKeys) {
    FQ_ASSIGN_OR_RETURN((*config)[name], gguf.GetInt(key, 1, kMaxDimension));
  }
  const auto hidden = (*config)["hidden_size"].get<int64_t>();
  const auto heads = (*config)["num_attention_heads"].get<int64_t>();
  FQ_ASSIGN_OR_RETURN(const int64_t kv_heads,
                      gguf.GetIntOr("llama.attention.head_count_kv", heads, 1, kMaxDimension));
  (*config)["num_key_value_heads"] = kv_heads;
  if (!gguf.Has("llama.attention.key_length") && hidden % heads != 0) {
    return gguf.Error("llama.attention.head_count",
                      fmt::format("must divide the width (limit {}, got {})", hidden, heads));
  }
  FQ_ASSIGN_OR_RETURN(const int64_t head_dim,
                      gguf.GetIntOr("llama.attention.key_length", hidden / heads, 2, 4096));
  if (head_dim < 2 || head_dim % 2 != 0) {
    return gguf.Error("llama.attention.key_length",
                      fmt::format("must be even (limit 2..4096, got {})", head_dim));
  }
  (*config)["head_dim"] = head_dim;
  FQ_ASSIGN_OR_RETURN(const int64_t value_dim,
                      gguf.GetIntOr("llama.attention.value_length", head_dim, 1, 4096));
  FQ_ASSIGN_OR_RETURN(const int64_t rope_dim,
                      gguf.GetIntOr("llama.rope.dimension_count", head_dim, 1, 4096));
  if (value_dim != head_dim || rope_dim != head_dim) {
    return UnimplementedError(
        "{}: head dimensions: key {}, value {} and rotary {} must be the same", gguf.path(),
        head_dim, value_dim, rope_dim);
  }
  FQ_ASSIGN_OR_RETURN(const int64_t experts, gguf.GetIntOr("llama.expert_count", 0, 0, 4096));
  if (experts != 0) {
    return UnimplementedError("{}: llama.expert_count: mixtures of experts are not supported",
                              gguf.path());
  }
  return absl::OkStatus();
}

// Adds the token id of `key` to config as `name`, when the file has it.
absl::Status ReadTokenId(const GgufFile& gguf, const char* key, const char* name,
                         nlohmann::json* config) {
  if (!gguf.Has(key)) return absl::OkStatus();
  const int64_t limit = (*config)["vocab_size"].get<int64_t>() - 1;
  FQ_ASSIGN_OR_RETURN((*config)[name], gguf.GetInt(key, 0, limit));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<nlohmann::json> ConfigFromGguf(const GgufFile& gguf) {
  FQ_ASSIGN_OR_RETURN(const std::string architecture, gguf.GetString("general.architecture"));
  if (architecture != "llama") {
    return UnimplementedError("{}: general.architecture: {} is not supported (llama is)",
                              gguf.path(), PrintableName(architecture));
  }
  nlohmann::json config = {{"architectures", {"LlamaForCausalLM"}},
                           {"model_type", "llama"},
                           {"hidden_act", "silu"},
                           {"torch_dtype", "bfloat16"}};
  FQ_RETURN_IF_ERROR(ReadDimensions(gguf, &config));
  const GgufTensor* const embedding = gguf.FindTensor("token_embd.weight");
  if (embedding == nullptr) {
    return DataLossError("{}: missing tensor token_embd.weight", gguf.path());
  }
  config["vocab_size"] = embedding->shape[0];
  config["tie_word_embeddings"] = gguf.FindTensor("output.weight") == nullptr;
  config["attention_bias"] = gguf.FindTensor("blk.0.attn_q.bias") != nullptr;
  config["mlp_bias"] = gguf.FindTensor("blk.0.ffn_gate.bias") != nullptr;
  FQ_ASSIGN_OR_RETURN(config["rms_norm_eps"],
                      gguf.GetDouble("llama.attention.layer_norm_rms_epsilon", 1e-12, 1));
  FQ_ASSIGN_OR_RETURN(const double theta,
                      gguf.GetDoubleOr("llama.rope.freq_base", 10'000, 1, 1e12));
  config["rope_theta"] = theta;
  FQ_ASSIGN_OR_RETURN(config["rope_scaling"],
                      RopeScaling(gguf, theta, config["head_dim"].get<int64_t>()));
  FQ_RETURN_IF_ERROR(ReadTokenId(gguf, "tokenizer.ggml.bos_token_id", "bos_token_id", &config));
  FQ_RETURN_IF_ERROR(ReadTokenId(gguf, "tokenizer.ggml.eos_token_id", "eos_token_id", &config));
  return config;
}

absl::StatusOr<nlohmann::json> GenerationConfigFromGguf(const GgufFile& gguf) {
  nlohmann::json config = nlohmann::json::object();
  std::vector<int64_t> ends;
  for (const char* const key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    if (!gguf.Has(key)) continue;
    FQ_ASSIGN_OR_RETURN(const int64_t id, gguf.GetInt(key, 0, kMaxDimension));
    ends.push_back(id);
  }
  // A chat model ends its turn with one of these even where the file names another end token.
  if (gguf.Has("tokenizer.ggml.tokens") && gguf.Has("tokenizer.ggml.token_type")) {
    FQ_ASSIGN_OR_RETURN(const auto* const tokens, gguf.GetStrings("tokenizer.ggml.tokens"));
    FQ_ASSIGN_OR_RETURN(const auto* const types, gguf.GetInts("tokenizer.ggml.token_type"));
    for (size_t i = 0; i < std::min(tokens->size(), types->size()); ++i) {
      const std::string& text = (*tokens)[i];
      if ((*types)[i] == kControlToken && (text == "<|eot_id|>" || text == "<|im_end|>")) {
        ends.push_back(static_cast<int64_t>(i));
      }
    }
  }
  std::vector<int64_t> unique;
  for (const int64_t id : ends) {
    if (std::find(unique.begin(), unique.end(), id) == unique.end()) unique.push_back(id);
  }
  if (unique.size() == 1) config["eos_token_id"] = unique[0];
  if (unique.size() > 1) config["eos_token_id"] = unique;
  if (gguf.Has("tokenizer.ggml.bos_token_id")) {
    FQ_ASSIGN_OR_RETURN(config["bos_token_id"],
                        gguf.GetInt("tokenizer.ggml.bos_token_id", 0, kMaxDimension));
  }
  return config;
}

}  // namespace flashquant
