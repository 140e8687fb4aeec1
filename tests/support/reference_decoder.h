// A whole decoder in double precision on a checkpoint's weights as they are stored (INT4 codes and
// outliers dequantized): the oracle for models that no other program has numbers for.
//
// Written after the architectures' and RoPE variants' published descriptions; reads config.json by
// itself and shares no arithmetic with the engine. Llama, Qwen2, Qwen3, Mistral and OPT; rope types
// default, linear, llama3 and yarn.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "nlohmann/json.hpp"

namespace flashquant {

class ReferenceDecoder final {
 public:
  // Aborts on a checkpoint that it cannot read.
  explicit ReferenceDecoder(const Checkpoint& checkpoint);

  // Logits [tokens][vocabulary].
  std::vector<std::vector<double>> Logits(std::span<const int32_t> tokens) const;

  // Turns of a pair of dimensions per position, and what all cosines and sines are multiplied with.
  static std::vector<double> RopeFrequencies(const nlohmann::json& config, double* scale);
  // As if rounded to BF16, which is how tests/data/tiny_models were made.
  void SetFrequencies(std::vector<double> frequencies) { frequencies_ = std::move(frequencies); }
  const std::vector<double>& frequencies() const { return frequencies_; }

 private:
  using Rows = std::vector<std::vector<double>>;

  struct Matrix {
    int64_t rows = 0;
    int64_t columns = 0;
    std::vector<double> values;
  };

  void Load(const Checkpoint& checkpoint);
  const std::vector<double>* Find(const std::string& name) const;
  Rows Linear(const Rows& x, const std::string& name) const;
  Rows Norm(const Rows& x, const std::string& name) const;
  void NormHead(const std::string& name, std::span<double> head) const;
  void Rotate(std::span<double> head, size_t position) const;
  Rows Attention(const Rows& x, const std::string& layer) const;
  Rows Mlp(const Rows& x, const std::string& layer) const;

  nlohmann::json config_;
  bool is_opt_ = false;
  size_t hidden_ = 0;
  size_t heads_ = 0;
  size_t kv_heads_ = 0;
  size_t head_dim_ = 0;
  size_t layers_ = 0;
  int64_t window_ = 0;  // 0: none
  double epsilon_ = 0;
  double rope_scale_ = 1;
  std::vector<double> frequencies_;
  std::map<std::string, Matrix> tensors_;
};

}  // namespace flashquant
