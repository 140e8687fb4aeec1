#include "engine/model/model_config.h"

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
  FQ_RETURN_IF_ERROR(ReadInt(config, "vocab_size", kMaxVocabulary, &out->vocab_size));
  FQ_RETURN_IF_ERROR(ReadInt(config, "hidden_size", kMaxWidth, &out->hidden_size));
  FQ_RETURN_IF_ERROR(ReadInt(config, "intermediate_size", kMaxWidth, &out->intermediate_size));
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

absl::Status ReadRopeScaling(const JsonObject& rope, ModelConfig* out) {
  // "type" is the older spelling of "rope_type".
  FQ_ASSIGN_OR_RETURN(const std::string old_type, rope.GetStringOr("type", "default"));
  FQ_ASSIGN_OR_RETURN(const std::string type, rope.GetStringOr("rope_type", old_type));
  if (type == "default") return absl::OkStatus();
  if (type != "linear" && type != "llama3") {
    return UnimplementedError("{}: rope_type '{}' is not supported (default, linear, llama3)",
                              rope.where(), type);
  }
  FQ_ASSIGN_OR_RETURN(out->rope.factor, rope.GetDouble("factor", 1.0, 1e6));
  out->rope.type = RopeType::kLinear;
  if (type == "linear") return absl::OkStatus();

  out->rope.type = RopeType::kLlama3;
  FQ_ASSIGN_OR_RETURN(out->rope.low_freq_factor, rope.GetDouble("low_freq_factor", 1e-6, 1e6));
  FQ_ASSIGN_OR_RETURN(out->rope.high_freq_factor, rope.GetDouble("high_freq_factor", 1e-6, 1e6));
  if (out->rope.high_freq_factor <= out->rope.low_freq_factor) {
    return rope.Error("high_freq_factor",
                      fmt::format("must be above low_freq_factor (limit {}, got {})",
                                  out->rope.low_freq_factor, out->rope.high_freq_factor));
  }
  FQ_ASSIGN_OR_RETURN(const int64_t original, rope.GetIntOr("original_max_position_embeddings",
                                                            out->max_position, 1, kMaxContext));
  out->rope.original_max_position = static_cast<int32_t>(original);
  return absl::OkStatus();
}

absl::Status ReadRope(const JsonObject& config, ModelConfig* out) {
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
  if (out->architecture != "LlamaForCausalLM") {
    return UnimplementedError("config.json: architecture '{}' is not supported (LlamaForCausalLM)",
                              out->architecture);
  }
  FQ_ASSIGN_OR_RETURN(const std::string activation, config.GetStringOr("hidden_act", "silu"));
  if (activation != "silu") {
    return UnimplementedError("config.json: hidden_act '{}' is not supported (silu)", activation);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const Checkpoint& checkpoint) {
  FQ_ASSIGN_OR_RETURN(const JsonObject config,
                      JsonObject::Create(checkpoint.config, "config.json"));
  ModelConfig out;
  FQ_RETURN_IF_ERROR(ReadArchitecture(config, &out));
  FQ_RETURN_IF_ERROR(ReadDimensions(config, &out));
  FQ_RETURN_IF_ERROR(ReadRope(config, &out));
  FQ_ASSIGN_OR_RETURN(const double epsilon, config.GetDoubleOr("rms_norm_eps", 1e-6, 1e-12, 1.0));
  out.rms_norm_eps = static_cast<float>(epsilon);
  FQ_ASSIGN_OR_RETURN(out.attention_bias, config.GetBoolOr("attention_bias", false));
  FQ_ASSIGN_OR_RETURN(out.mlp_bias, config.GetBoolOr("mlp_bias", false));
  FQ_ASSIGN_OR_RETURN(out.tie_word_embeddings, config.GetBoolOr("tie_word_embeddings", false));
  FQ_ASSIGN_OR_RETURN(out.quantization, ParseQuantizationConfig(checkpoint.config));
  return out;
}

}  // namespace flashquant
