#include "engine/model/model_config.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>
#include <utility>

#include "engine/checkpoint/json.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// Upper bounds keep every later product of dimensions inside 64 bits and refuse files that would
// only exhaust memory; each is far above the largest published model.
constexpr int64_t kMaxVocabulary = 1 << 24;
constexpr int64_t kMaxWidth = 1 << 20;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxContext = 1 << 24;

absl::Status ReadInt(const JsonObject& config, std::string_view key, int64_t max, int32_t* out) {
  FQ_ASSIGN_OR_RETURN(const int64_t value, config.GetInt(key, 1, max));
  *out = static_cast<int32_t>(value);
  return absl::OkStatus();
}

absl::Status ReadDimensions(const JsonObject& config, ModelConfig* out) {
  const bool opt = out->family == DecoderFamily::kOpt;
  FQ_RETURN_IF_ERROR(ReadInt(config, "vocab_size", kMaxVocabulary, &out->vocab_size));
  FQ_RETURN_IF_ERROR(ReadInt(config, "hidden_size", kMaxWidth, &out->hidden_size));
  FQ_RETURN_IF_ERROR(
      ReadInt(config, opt ? "ffn_dim" : "intermediate_size", kMaxWidth, &out->intermediate_size));
  FQ_RETURN_IF_ERROR(ReadInt(config, "num_hidden_layers", kMaxLayers, &out->num_layers));
  FQ_RETURN_IF_ERROR(ReadInt(config, "num_attention_heads", kMaxHeads, &out->num_heads));
  FQ_RETURN_IF_ERROR(ReadInt(config, "max_position_embeddings", kMaxContext, &out->max_position));
  FQ_ASSIGN_OR_RETURN(const int64_t kv_heads,
                      config.GetIntOr("num_key_value_heads", out->num_heads, 1, kMaxHeads));
  out->num_kv_heads = static_cast<int32_t>(kv_heads);
  if (out->num_kv_heads > out->num_heads || out->num_heads % out->num_kv_heads != 0) {
    return config.Error("num_key_value_heads",
                        fmt::format("must divide num_attention_heads (limit {}, got {})",
                                    out->num_heads, out->num_kv_heads));
  }
  if (!config.Has("head_dim") && out->hidden_size % out->num_heads != 0) {
    return config.Error("num_attention_heads",
                        fmt::format("must divide hidden_size (limit {}, got {})", out->hidden_size,
                                    out->num_heads));
  }
  FQ_ASSIGN_OR_RETURN(
      const int64_t head_dim,
      config.GetIntOr("head_dim", out->hidden_size / out->num_heads, 2, kMaxHeadDim));
  if (head_dim % 2 != 0 || head_dim > kMaxHeadDim || head_dim < 2) {
    return config.Error("head_dim",
                        fmt::format("must be even (limit {}, got {})", kMaxHeadDim, head_dim));
  }
  out->head_dim = static_cast<int32_t>(head_dim);
  return absl::OkStatus();
}

// A key whose absence (or null) leaves the default.
absl::Status ReadOptionalDouble(const JsonObject& object, std::string_view key, double* out) {
  FQ_ASSIGN_OR_RETURN(*out, object.GetDoubleOr(key, *out, 1e-6, 1e6));
  return absl::OkStatus();
}

double YarnScale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

absl::Status ReadYarn(const JsonObject& rope, ModelConfig* out) {
  RopeConfig& yarn = out->rope;
  FQ_RETURN_IF_ERROR(ReadOptionalDouble(rope, "beta_fast", &yarn.beta_fast));
  FQ_RETURN_IF_ERROR(ReadOptionalDouble(rope, "beta_slow", &yarn.beta_slow));
  FQ_ASSIGN_OR_RETURN(yarn.truncate, rope.GetBoolOr("truncate", true));
  FQ_ASSIGN_OR_RETURN(const double mscale, rope.GetDoubleOr("mscale", 0.0, 0.0, 1e6));
  FQ_ASSIGN_OR_RETURN(const double all_dim, rope.GetDoubleOr("mscale_all_dim", 0.0, 0.0, 1e6));
  yarn.attention_factor = mscale != 0 && all_dim != 0
                              ? YarnScale(yarn.factor, mscale) / YarnScale(yarn.factor, all_dim)
                              : YarnScale(yarn.factor, 1.0);
  FQ_RETURN_IF_ERROR(ReadOptionalDouble(rope, "attention_factor", &yarn.attention_factor));
  const double stretched = yarn.factor * yarn.original_max_position;
  if (rope.Has("original_max_position_embeddings") && stretched <= double{kMaxContext}) {
    out->max_position = std::max(out->max_position, static_cast<int32_t>(stretched));
  }
  return absl::OkStatus();
}

absl::Status ReadLlama3(const JsonObject& rope, ModelConfig* out) {
  FQ_ASSIGN_OR_RETURN(out->rope.low_freq_factor, rope.GetDouble("low_freq_factor", 1e-6, 1e6));
  FQ_ASSIGN_OR_RETURN(out->rope.high_freq_factor, rope.GetDouble("high_freq_factor", 1e-6, 1e6));
  if (out->rope.high_freq_factor > out->rope.low_freq_factor) return absl::OkStatus();
  return rope.Error("high_freq_factor",
                    fmt::format("must be above low_freq_factor (limit {}, got {})",
                                out->rope.low_freq_factor, out->rope.high_freq_factor));
}

absl::Status ReadRopeScaling(const JsonObject& rope, ModelConfig* out) {
  // "type" is the older spelling of "rope_type".
  FQ_ASSIGN_OR_RETURN(const std::string old_type, rope.GetStringOr("type", "default"));
  FQ_ASSIGN_OR_RETURN(const std::string type, rope.GetStringOr("rope_type", old_type));
  if (type == "default") return absl::OkStatus();
  constexpr std::pair<std::string_view, RopeType> kTypes[] = {{"linear", RopeType::kLinear},
                                                              {"dynamic", RopeType::kDynamic},
                                                              {"llama3", RopeType::kLlama3},
                                                              {"yarn", RopeType::kYarn}};
  for (const auto& [name, value] : kTypes) {
    if (type == name) out->rope.type = value;
  }
  if (out->rope.type == RopeType::kDefault) {
    return UnimplementedError(
        "{}: rope_type '{}' is not supported (default, linear, dynamic, llama3, yarn)",
        rope.where(), type);
  }
  FQ_ASSIGN_OR_RETURN(out->rope.factor, rope.GetDouble("factor", 1.0, 1e6));
  FQ_ASSIGN_OR_RETURN(const int64_t original, rope.GetIntOr("original_max_position_embeddings",
                                                            out->max_position, 1, kMaxContext));
  out->rope.original_max_position = static_cast<int32_t>(original);
  if (out->rope.type == RopeType::kYarn) return ReadYarn(rope, out);
  return out->rope.type == RopeType::kLlama3 ? ReadLlama3(rope, out) : absl::OkStatus();
}

absl::Status ReadRope(const JsonObject& config, ModelConfig* out) {
  FQ_ASSIGN_OR_RETURN(const double partial,
                      config.GetDoubleOr("partial_rotary_factor", 1.0, 0.0, 1.0));
  if (partial != 1.0) {
    return UnimplementedError("config.json: partial_rotary_factor {} is not supported (1)",
                              partial);
  }
  FQ_ASSIGN_OR_RETURN(out->rope.theta, config.GetDoubleOr("rope_theta", 10000.0, 1.0, 1e12));
  if (config.Has("rope_parameters")) {  // transformers 5
    FQ_ASSIGN_OR_RETURN(const JsonObject rope, config.GetObject("rope_parameters"));
    FQ_ASSIGN_OR_RETURN(out->rope.theta,
                        rope.GetDoubleOr("rope_theta", out->rope.theta, 1.0, 1e12));
    return ReadRopeScaling(rope, out);
  }
  if (!config.Has("rope_scaling")) return absl::OkStatus();
  FQ_ASSIGN_OR_RETURN(const JsonObject rope, config.GetObject("rope_scaling"));
  return ReadRopeScaling(rope, out);
}

absl::Status ReadArchitecture(const JsonObject& config, ModelConfig* out) {
  FQ_ASSIGN_OR_RETURN(const nlohmann::json* names, config.GetArray("architectures", 16));
  if (names->empty() || !names->front().is_string()) {
    return config.Error("architectures", "must name the model's class (got an empty list)");
  }
  out->architecture = names->front().get<std::string>();
  constexpr std::string_view kKnown[] = {"LlamaForCausalLM", "MistralForCausalLM", "OPTForCausalLM",
                                         "Qwen2ForCausalLM", "Qwen3ForCausalLM"};
  if (std::find(std::begin(kKnown), std::end(kKnown), out->architecture) == std::end(kKnown)) {
    return UnimplementedError("config.json: architecture '{}' is not supported ({})",
                              out->architecture, fmt::join(kKnown, ", "));
  }
  const bool opt = out->architecture == "OPTForCausalLM";
  out->family = opt ? DecoderFamily::kOpt : DecoderFamily::kLlama;
  const std::string key = opt ? "activation_function" : "hidden_act";
  const std::string known = opt ? "relu" : "silu";
  FQ_ASSIGN_OR_RETURN(const std::string activation, config.GetStringOr(key, known));
  if (activation != known) {
    return UnimplementedError("config.json: {} '{}' is not supported ({})", key, activation, known);
  }
  return absl::OkStatus();
}

// A key that, when it is there, must have the one value that we run.
absl::Status RequireBool(const JsonObject& config, const char* key, bool value) {
  FQ_ASSIGN_OR_RETURN(const bool found, config.GetBoolOr(key, value));
  if (found == value) return absl::OkStatus();
  return UnimplementedError("config.json: {} {} is not supported ({})", key, found, value);
}

absl::Status ReadOpt(const JsonObject& config, ModelConfig* out) {
  FQ_RETURN_IF_ERROR(RequireBool(config, "do_layer_norm_before", true));
  FQ_RETURN_IF_ERROR(RequireBool(config, "enable_bias", true));
  FQ_RETURN_IF_ERROR(RequireBool(config, "layer_norm_elementwise_affine", true));
  FQ_RETURN_IF_ERROR(RequireBool(config, "_remove_final_layer_norm", false));
  FQ_ASSIGN_OR_RETURN(const int64_t width,
                      config.GetIntOr("word_embed_proj_dim", out->hidden_size, 1, kMaxWidth));
  if (width != out->hidden_size) {
    return UnimplementedError(
        "config.json: word_embed_proj_dim {} is not supported (hidden_size, {})", width,
        out->hidden_size);
  }
  out->norm_epsilon = 1e-5f;
  out->attention_bias = out->attention_output_bias = out->mlp_bias = true;
  FQ_ASSIGN_OR_RETURN(out->tie_word_embeddings, config.GetBoolOr("tie_word_embeddings", true));
  return absl::OkStatus();
}

// layer_types says it layer by layer; older files say it by max_window_layers (Qwen) or mean all
// layers (Mistral).
absl::Status ReadSlidingWindows(const JsonObject& config, ModelConfig* out) {
  const bool qwen = out->architecture.starts_with("Qwen");
  FQ_ASSIGN_OR_RETURN(const bool used,
                      config.GetBoolOr("use_sliding_window", out->architecture[0] == 'M'));
  if (!used || !config.Has("sliding_window") || !(qwen || out->architecture[0] == 'M')) {
    return absl::OkStatus();
  }
  int32_t window = 0;
  FQ_RETURN_IF_ERROR(ReadInt(config, "sliding_window", kMaxContext, &window));
  out->sliding_windows.assign(static_cast<size_t>(out->num_layers), window);
  if (config.Has("layer_types")) {
    FQ_ASSIGN_OR_RETURN(const nlohmann::json* types, config.GetArray("layer_types", kMaxLayers));
    if (static_cast<int32_t>(types->size()) != out->num_layers) {
      return config.Error("layer_types",
                          fmt::format("must have num_hidden_layers (needs {}, got {})",
                                      out->num_layers, types->size()));
    }
    for (size_t layer = 0; layer < types->size(); ++layer) {
      const nlohmann::json& type = (*types)[layer];
      if (type == "full_attention") {
        out->sliding_windows[layer] = 0;
      } else if (type != "sliding_attention") {
        return UnimplementedError("config.json: layer_types: {} is not supported", type.dump());
      }
    }
    return absl::OkStatus();
  }
  if (!qwen) return absl::OkStatus();
  FQ_ASSIGN_OR_RETURN(const int64_t full,
                      config.GetIntOr("max_window_layers", out->num_layers, 0, kMaxLayers));
  for (int32_t layer = 0; layer < std::min<int64_t>(full, out->num_layers); ++layer) {
    out->sliding_windows[static_cast<size_t>(layer)] = 0;
  }
  return absl::OkStatus();
}

absl::Status ReadLlama(const JsonObject& config, ModelConfig* out) {
  FQ_RETURN_IF_ERROR(ReadRope(config, out));
  FQ_ASSIGN_OR_RETURN(const double epsilon, config.GetDoubleOr("rms_norm_eps", 1e-6, 1e-12, 1.0));
  out->norm_epsilon = static_cast<float>(epsilon);
  const bool qwen2 = out->architecture == "Qwen2ForCausalLM";
  FQ_ASSIGN_OR_RETURN(out->attention_bias, config.GetBoolOr("attention_bias", qwen2));
  if (qwen2) out->attention_bias = true;  // whatever the file says, as in the model's own code
  out->attention_output_bias = out->attention_bias && !qwen2;
  out->head_norms = out->architecture == "Qwen3ForCausalLM";
  FQ_ASSIGN_OR_RETURN(out->mlp_bias, config.GetBoolOr("mlp_bias", false));
  FQ_ASSIGN_OR_RETURN(out->tie_word_embeddings, config.GetBoolOr("tie_word_embeddings", false));
  return ReadSlidingWindows(config, out);
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const Checkpoint& checkpoint) {
  FQ_ASSIGN_OR_RETURN(const JsonObject config,
                      JsonObject::Create(checkpoint.config, "config.json"));
  ModelConfig out;
  FQ_RETURN_IF_ERROR(ReadArchitecture(config, &out));
  FQ_RETURN_IF_ERROR(ReadDimensions(config, &out));
  FQ_RETURN_IF_ERROR(out.family == DecoderFamily::kOpt ? ReadOpt(config, &out)
                                                       : ReadLlama(config, &out));
  FQ_ASSIGN_OR_RETURN(out.quantization, ParseQuantizationConfig(checkpoint.config));
  return out;
}

}  // namespace flashquant
