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

// kDynamic changes nothing up to max_position, which is as far as a context goes here.
enum class RopeType { kDefault, kLinear, kDynamic, kLlama3, kYarn };

struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  double factor = 1.0;                // all but default
  double low_freq_factor = 1.0;       // llama3
  double high_freq_factor = 4.0;      // llama3
  int32_t original_max_position = 0;  // llama3 and yarn
  double beta_fast = 32.0;            // yarn: rotations above which a frequency stays as it is
  double beta_slow = 1.0;             // yarn: rotations below which it is divided by the factor
  bool truncate = true;               // yarn: whether the range between is rounded to whole pairs
  double attention_factor = 1.0;      // yarn: what cosines and sines are multiplied by
};

// How a decoder's layers are built, and what its tensors are called.
enum class DecoderFamily {
  kLlama,  // RMSNorm, rotary positions, gated SiLU: Llama, Mistral, Qwen2, Qwen3
  kOpt,    // LayerNorm, learned positions, ReLU
};
// A row of OPT's table for position p is p + 2.
inline constexpr int32_t kOptPositionOffset = 2;

struct ModelConfig {
  std::string architecture;  // "LlamaForCausalLM"
  DecoderFamily family = DecoderFamily::kLlama;
  int32_t vocab_size = 0;
  int32_t hidden_size = 0;
  int32_t intermediate_size = 0;
  int32_t num_layers = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t max_position = 0;  // tokens of context
  float norm_epsilon = 1e-5f;
  bool attention_bias = false;  // of q, k and v
  bool attention_output_bias = false;
  bool head_norms = false;  // q and k are normalised head by head (Qwen3)
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
  // Keys that each layer's attention sees, the row itself included, 0 = all; empty: all layers all.
  std::vector<int32_t> sliding_windows;
  RopeConfig rope;
  std::optional<QuantizationConfig> quantization;

  int32_t sliding_window(int32_t layer) const {
    return sliding_windows.empty() ? 0 : sliding_windows[static_cast<size_t>(layer)];
  }
  // Columns of the fused q, k, v projection.
  int32_t qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

// DATA_LOSS "config.json: ‹key›: ..." for a missing or impossible value, UNIMPLEMENTED naming an
// architecture, activation, rope type or option that we do not run. Takes the old (rope_theta,
// rope_scaling) and the new (rope_parameters) form. With yarn, max_position is at least factor *
// original_max_position.
absl::StatusOr<ModelConfig> ParseModelConfig(const Checkpoint& checkpoint);

}  // namespace flashquant
