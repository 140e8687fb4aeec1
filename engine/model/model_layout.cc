#include "engine/model/model_layout.h"

#include <utility>

#include "engine/checkpoint/quantized_tensors.h"
#include "fmt/format.h"

namespace flashquant {
namespace {

std::string LayerPrefix(const ModelConfig& config, int32_t layer) {
  return fmt::format("{}layers.{}.", NamePrefix(config.family), layer);
}

}  // namespace

int64_t LinearShape::n() const {
  int64_t sum = 0;
  for (const LinearPartShape& part : parts) sum += part.n;
  return sum;
}

std::string_view NamePrefix(DecoderFamily family) {
  return family == DecoderFamily::kOpt ? "model.decoder." : "model.";
}

std::array<LinearShape, kLinearsPerLayer> LayerLinears(const ModelConfig& config, int32_t layer) {
  const std::string prefix = LayerPrefix(config, layer);
  const bool opt = config.family == DecoderFamily::kOpt;
  const int64_t hidden = config.hidden_size;
  const int64_t q_size = int64_t{config.num_heads} * config.head_dim;
  const int64_t kv_size = int64_t{config.num_kv_heads} * config.head_dim;
  const bool attention_bias = config.attention_bias;
  const bool mlp_bias = config.mlp_bias;
  LinearShape up{{}, hidden};
  if (opt) {
    up.parts = {{prefix + "fc1", config.intermediate_size, mlp_bias}};
  } else {
    up.parts = {{prefix + "mlp.gate_proj", config.intermediate_size, mlp_bias},
                {prefix + "mlp.up_proj", config.intermediate_size, mlp_bias}};
  }
  return {LinearShape{{{prefix + "self_attn.q_proj", q_size, attention_bias},
                       {prefix + "self_attn.k_proj", kv_size, attention_bias},
                       {prefix + "self_attn.v_proj", kv_size, attention_bias}},
                      hidden},
          LinearShape{{{prefix + (opt ? "self_attn.out_proj" : "self_attn.o_proj"), hidden,
                        config.attention_output_bias}},
                      q_size},
          std::move(up),
          LinearShape{{{prefix + (opt ? "fc2" : "mlp.down_proj"), hidden, mlp_bias}},
                      config.intermediate_size}};
}

std::array<NormShape, 2> LayerNorms(const ModelConfig& config, int32_t layer) {
  const std::string prefix = LayerPrefix(config, layer);
  const int64_t hidden = config.hidden_size;
  if (config.family == DecoderFamily::kOpt) {
    return {NormShape{prefix + "self_attn_layer_norm", hidden, true},
            NormShape{prefix + "final_layer_norm", hidden, true}};
  }
  return {NormShape{prefix + "input_layernorm", hidden, false},
          NormShape{prefix + "post_attention_layernorm", hidden, false}};
}

std::array<NormShape, 2> HeadNorms(const ModelConfig& config, int32_t layer) {
  const std::string prefix = LayerPrefix(config, layer);
  return {NormShape{prefix + "self_attn.q_norm", config.head_dim, false},
          NormShape{prefix + "self_attn.k_norm", config.head_dim, false}};
}

KvScaleNames KvScalesOf(const ModelConfig& config, int32_t layer) {
  const std::string prefix = LayerPrefix(config, layer) + "self_attn.";
  return {{prefix + "k_scale", prefix + "k_proj.k_scale"},
          {prefix + "v_scale", prefix + "v_proj.v_scale"}};
}

NormShape FinalNorm(const ModelConfig& config) {
  const bool opt = config.family == DecoderFamily::kOpt;
  return {fmt::format("{}{}", NamePrefix(config.family), opt ? "final_layer_norm" : "norm"),
          config.hidden_size, opt};
}

LinearShape EmbeddingShape(const ModelConfig& config) {
  return {{{fmt::format("{}embed_tokens", NamePrefix(config.family)), config.vocab_size, false}},
          config.hidden_size};
}

LinearShape HeadShape(const ModelConfig& config) {
  return {{{std::string(kHeadName), config.vocab_size, false}}, config.hidden_size};
}

bool HasOwnHead(const TensorSource& tensors, const ModelConfig& config) {
  return !config.tie_word_embeddings || IsQuantizedLinear(tensors, kHeadName) ||
         tensors.Find(fmt::format("{}.weight", kHeadName)) != nullptr;
}

}  // namespace flashquant
