#include "engine/model/model_layout.h"

#include "engine/checkpoint/quantized_tensors.h"
#include "fmt/format.h"

namespace flashquant {

int64_t LinearShape::n() const {
  int64_t sum = 0;
  for (const LinearPartShape& part : parts) sum += part.n;
  return sum;
}

std::array<LinearShape, kLinearsPerLayer> LayerLinears(const ModelConfig& config, int32_t layer) {
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  const int64_t hidden = config.hidden_size;
  const int64_t q_size = int64_t{config.num_heads} * config.head_dim;
  const int64_t kv_size = int64_t{config.num_kv_heads} * config.head_dim;
  const bool attention_bias = config.attention_bias;
  const bool mlp_bias = config.mlp_bias;
  return {LinearShape{{{prefix + "self_attn.q_proj", q_size, attention_bias},
                       {prefix + "self_attn.k_proj", kv_size, attention_bias},
                       {prefix + "self_attn.v_proj", kv_size, attention_bias}},
                      hidden},
          LinearShape{{{prefix + "self_attn.o_proj", hidden, attention_bias}}, q_size},
          LinearShape{{{prefix + "mlp.gate_proj", config.intermediate_size, mlp_bias},
                       {prefix + "mlp.up_proj", config.intermediate_size, mlp_bias}},
                      hidden},
          LinearShape{{{prefix + "mlp.down_proj", hidden, mlp_bias}}, config.intermediate_size}};
}

std::array<std::string, 2> LayerNorms(int32_t layer) {
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  return {prefix + "input_layernorm.weight", prefix + "post_attention_layernorm.weight"};
}

LinearShape EmbeddingShape(const ModelConfig& config) {
  return {{{std::string(kEmbeddingName), config.vocab_size, false}}, config.hidden_size};
}

LinearShape HeadShape(const ModelConfig& config) {
  return {{{std::string(kHeadName), config.vocab_size, false}}, config.hidden_size};
}

bool HasOwnHead(const TensorSource& tensors, const ModelConfig& config) {
  return !config.tie_word_embeddings || IsQuantizedLinear(tensors, kHeadName) ||
         tensors.Find(fmt::format("{}.weight", kHeadName)) != nullptr;
}

}  // namespace flashquant
