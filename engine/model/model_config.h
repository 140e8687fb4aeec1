// ModelConfig: the dimensions of a decoder, read from config.json and checked, each within a stated
// range.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/quantized_tensors.h"

namespace flashquant {

enum class RopeType { kDefault, kLinear, kLlama3 };

struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  double factor = 1.0;                // linear and llama3
  double low_freq_factor = 1.0;       // llama3
  double high_freq_factor = 4.0;      // llama3
  int32_t original_max_position = 0;  // llama3
};

struct ModelConfig {
  std::string architecture;  // "LlamaForCausalLM"
  int32_t vocab_size = 0;
  int32_t hidden_size = 0;
  int32_t intermediate_size = 0;
  int32_t num_layers = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t max_position = 0;  // tokens of context
  float rms_norm_eps = 1e-5f;
  bool attention_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
  RopeConfig rope;
  std::optional<QuantizationConfig> quantization;

  // Columns of the fused q, k, v projection.
  int32_t qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

// DATA_LOSS "config.json: ‹key›: ..." for a missing or impossible value, UNIMPLEMENTED naming an
// architecture, activation or rope type that we do not run. Takes the old (rope_theta,
// rope_scaling) and the new (rope_parameters) form.
absl::StatusOr<ModelConfig> ParseModelConfig(const Checkpoint& checkpoint);

}  // namespace flashquant
