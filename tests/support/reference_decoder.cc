#include "tests/support/reference_decoder.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/checkpoint/quantized_tensors.h"
#include "kernels/base/bfloat16.h"
#include "kernels/base/check.h"

namespace flashquant {
namespace {

double Get(const nlohmann::json& object, const std::string& key, double fallback) {
  return object.contains(key) && object[key].is_number() ? object[key].get<double>() : fallback;
}

// Of either place: rope_parameters holds the base too, rope_scaling does not.
nlohmann::json RopeSection(const nlohmann::json& config) {
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (config.contains(key) && config[key].is_object()) return config[key];
  }
  return nlohmann::json::object();
}

// Linear layers of a quantized folder, as [n, k]; the true shape is in the configuration where it
// was padded.
std::vector<double> DequantizeInt4(const Checkpoint& checkpoint, const std::string& name,
                                   int64_t* n, int64_t* k) {
  const auto config = ParseQuantizationConfig(checkpoint.config);
  FQ_CHECK(config.ok() && config->has_value());
  const TensorInfo* const codes = checkpoint.tensors->Find(name + ".qweight");
  *n = codes->shape[0];
  *k = 2 * codes->shape[1];
  const nlohmann::json& shapes = (*config)->true_shapes;
  if (shapes.contains(name)) {
    *n = shapes[name][0].get<int64_t>();
    *k = shapes[name][1].get<int64_t>();
  }
  const auto linear = ReadQuantizedLinear(*checkpoint.tensors, **config, name, *n, *k);
  FQ_CHECK(linear.ok());
  const Int4Weight& weight = linear->weight;
  std::vector<double> dense(static_cast<size_t>(*n * *k));
  for (int64_t row = 0; row < *n; ++row) {
    for (int64_t column = 0; column < *k; ++column) {
      const int64_t group = column / weight.group_size;
      dense[static_cast<size_t>(row * *k + column)] =
          static_cast<double>(
              ToFloat(weight.scales[static_cast<size_t>(row * weight.groups_per_row() + group)])) *
          (weight.Code(row, column) - weight.ZeroPoint(row, group));
    }
  }
  if (linear->outliers.has_value()) {
    linear->outliers->ForEachSlot([&](int64_t column, int64_t row, uint16_t bits) {
      dense[static_cast<size_t>(row * *k + column)] += static_cast<double>(ToFloat(BFloat16{bits}));
    });
  }
  return dense;
}

std::vector<double> DequantizeInt8(const Checkpoint& checkpoint, const TensorInfo& table) {
  const auto codes = checkpoint.tensors->ReadBytes(table.name);
  FQ_CHECK(codes.ok());
  const TensorInfo* const scale = checkpoint.tensors->Find(table.name + "_scale");
  std::vector<float> scales(static_cast<size_t>(table.shape[0]));
  FQ_CHECK(checkpoint.tensors->ReadRowsAsFloat(*scale, 0, table.shape[0], scales.data()).ok());
  std::vector<double> values;
  for (size_t i = 0; i < codes->size(); ++i) {
    values.push_back(static_cast<double>(scales[i / static_cast<size_t>(table.shape[1])]) *
                     static_cast<int8_t>((*codes)[i]));
  }
  return values;
}

}  // namespace

ReferenceDecoder::ReferenceDecoder(const Checkpoint& checkpoint) : config_(checkpoint.config) {
  is_opt_ = config_["model_type"] == "opt";
  hidden_ = config_["hidden_size"].get<size_t>();
  heads_ = config_["num_attention_heads"].get<size_t>();
  kv_heads_ = static_cast<size_t>(Get(config_, "num_key_value_heads", static_cast<double>(heads_)));
  head_dim_ = static_cast<size_t>(Get(config_, "head_dim", static_cast<double>(hidden_ / heads_)));
  layers_ = config_["num_hidden_layers"].get<size_t>();
  epsilon_ = is_opt_ ? 1e-5 : Get(config_, "rms_norm_eps", 1e-6);
  const bool uses_window =
      !config_.contains("use_sliding_window") || config_["use_sliding_window"].get<bool>();
  window_ = uses_window ? static_cast<int64_t>(Get(config_, "sliding_window", 0)) : 0;
  if (!is_opt_) {
    nlohmann::json config = config_;
    config["head_dim"] = head_dim_;
    frequencies_ = RopeFrequencies(config, &rope_scale_);
  }
  Load(checkpoint);
}

void ReferenceDecoder::Load(const Checkpoint& checkpoint) {
  for (const TensorInfo& tensor : checkpoint.tensors->tensors()) {
    const std::string& name = tensor.name;
    Matrix matrix;
    std::string key = name;
    if (name.ends_with(".qweight")) {
      key = name.substr(0, name.size() - 8) + ".weight";
      matrix.values = DequantizeInt4(checkpoint, name.substr(0, name.size() - 8), &matrix.rows,
                                     &matrix.columns);
    } else if (tensor.dtype == DType::kI8) {
      matrix = {tensor.shape[0], tensor.shape[1], DequantizeInt8(checkpoint, tensor)};
    } else if (name.ends_with(".weight") || name.ends_with(".bias")) {
      matrix.rows = tensor.shape[0];
      matrix.columns = tensor.shape.size() > 1 ? tensor.shape[1] : 1;
      std::vector<float> values(static_cast<size_t>(matrix.rows * matrix.columns));
      FQ_CHECK(checkpoint.tensors->ReadRowsAsFloat(tensor, 0, matrix.rows, values.data()).ok());
      matrix.values.assign(values.begin(), values.end());
    } else {
      continue;
    }
    tensors_[key] = std::move(matrix);
  }
}

std::vector<double> ReferenceDecoder::RopeFrequencies(const nlohmann::json& config, double* scale) {
  const nlohmann::json rope = RopeSection(config);
  const double base = Get(rope, "rope_theta", Get(config, "rope_theta", 10000));
  const double dims = config["head_dim"].get<double>();
  const double factor = Get(rope, "factor", 1);
  const double trained =
      Get(rope, "original_max_position_embeddings", Get(config, "max_position_embeddings", 2048));
  std::string type = rope.value("rope_type", rope.value("type", std::string("default")));
  *scale = type == "yarn" ? 0.1 * std::log(factor) + 1 : 1;
  std::vector<double> frequencies;
  for (double i = 0; i < dims / 2; ++i) {
    const double frequency = std::pow(base, -2 * i / dims);
    const double turns = trained * frequency / (2 * std::numbers::pi);  // over the trained context
    double kept = 1;  // share of the frequency that is left as it is
    if (type == "linear") kept = 0;
    if (type == "llama3") {
      const double low = Get(rope, "low_freq_factor", 1);
      const double high = Get(rope, "high_freq_factor", 4);
      kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    }
    if (type == "yarn") {
      // The paper's ramp, as its authors' code has it: straight in the dimension between those that
      // turn beta_fast and beta_slow times, both rounded outwards.
      const auto dimension = [&](double wanted) {
        return dims / 2 * std::log(trained / (wanted * 2 * std::numbers::pi)) / std::log(base);
      };
      const double first = std::max(0.0, std::floor(dimension(Get(rope, "beta_fast", 32))));
      const double last = std::min(dims - 1, std::ceil(dimension(Get(rope, "beta_slow", 1))));
      kept = 1 - std::clamp((i - first) / std::max(last - first, 0.001), 0.0, 1.0);
    }
    frequencies.push_back(kept * frequency + (1 - kept) * frequency / factor);
  }
  return frequencies;
}

const std::vector<double>* ReferenceDecoder::Find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second.values;
}

ReferenceDecoder::Rows ReferenceDecoder::Linear(const Rows& x, const std::string& name) const {
  const Matrix& weight = tensors_.at(name + ".weight");
  const std::vector<double>* const bias = Find(name + ".bias");
  Rows y;
  for (const std::vector<double>& row : x) {
    std::vector<double> out(static_cast<size_t>(weight.rows));
    for (size_t n = 0; n < out.size(); ++n) {
      out[n] = bias == nullptr ? 0 : (*bias)[n];
      for (size_t k = 0; k < row.size(); ++k) out[n] += row[k] * weight.values[n * row.size() + k];
    }
    y.push_back(std::move(out));
  }
  return y;
}

ReferenceDecoder::Rows ReferenceDecoder::Norm(const Rows& x, const std::string& name) const {
  const std::vector<double>& weight = *Find(name + ".weight");
  const std::vector<double>* const bias = Find(name + ".bias");
  Rows y = x;
  for (std::vector<double>& row : y) {
    const double count = static_cast<double>(row.size());
    double mean = 0;
    if (is_opt_) {
      for (const double value : row) mean += value / count;
    }
    double variance = 0;
    for (const double value : row) variance += (value - mean) * (value - mean) / count;
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = (row[i] - mean) / std::sqrt(variance + epsilon_) * weight[i] +
               (bias == nullptr ? 0 : (*bias)[i]);
    }
  }
  return y;
}

void ReferenceDecoder::NormHead(const std::string& name, std::span<double> head) const {
  const std::vector<double>* const weight = Find(name + ".weight");
  if (weight == nullptr) return;
  double mean_square = 0;
  for (const double value : head) mean_square += value * value / static_cast<double>(head.size());
  for (size_t i = 0; i < head.size(); ++i) {
    head[i] *= (*weight)[i] / std::sqrt(mean_square + epsilon_);
  }
}

void ReferenceDecoder::Rotate(std::span<double> head, size_t position) const {
  if (is_opt_) return;
  const size_t half = head.size() / 2;
  for (size_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * frequencies_[i];
    const double c = std::cos(angle) * rope_scale_;
    const double s = std::sin(angle) * rope_scale_;
    const double first = head[i];
    const double second = head[i + half];
    head[i] = first * c - second * s;
    head[i + half] = second * c + first * s;
  }
}

ReferenceDecoder::Rows ReferenceDecoder::Attention(const Rows& x, const std::string& layer) const {
  Rows q = Linear(x, layer + "self_attn.q_proj");
  Rows k = Linear(x, layer + "self_attn.k_proj");
  const Rows v = Linear(x, layer + "self_attn.v_proj");
  for (size_t position = 0; position < x.size(); ++position) {
    for (size_t head = 0; head < heads_; ++head) {
      const auto part = std::span(q[position]).subspan(head * head_dim_, head_dim_);
      NormHead(layer + "self_attn.q_norm", part);
      Rotate(part, position);
    }
    for (size_t head = 0; head < kv_heads_; ++head) {
      const auto part = std::span(k[position]).subspan(head * head_dim_, head_dim_);
      NormHead(layer + "self_attn.k_norm", part);
      Rotate(part, position);
    }
  }
  Rows out(x.size(), std::vector<double>(heads_ * head_dim_, 0.0));
  for (size_t position = 0; position < x.size(); ++position) {
    const size_t span = window_ == 0 ? position + 1 : static_cast<size_t>(window_);
    const size_t first = position + 1 > span ? position + 1 - span : 0;
    for (size_t head = 0; head < heads_; ++head) {
      const size_t from = head / (heads_ / kv_heads_) * head_dim_;
      std::vector<double> weights;
      double sum = 0;
      for (size_t other = first; other <= position; ++other) {
        double score = 0;
        for (size_t d = 0; d < head_dim_; ++d) {
          score += q[position][head * head_dim_ + d] * k[other][from + d];
        }
        weights.push_back(std::exp(score / std::sqrt(static_cast<double>(head_dim_))));
        sum += weights.back();
      }
      for (size_t other = first; other <= position; ++other) {
        for (size_t d = 0; d < head_dim_; ++d) {
          out[position][head * head_dim_ + d] += weights[other - first] / sum * v[other][from + d];
        }
      }
    }
  }
  return Linear(out, layer + (is_opt_ ? "self_attn.out_proj" : "self_attn.o_proj"));
}

ReferenceDecoder::Rows ReferenceDecoder::Mlp(const Rows& x, const std::string& layer) const {
  if (is_opt_) {
    Rows inner = Linear(x, layer + "fc1");
    for (std::vector<double>& row : inner) {
      for (double& value : row) value = std::max(value, 0.0);
    }
    return Linear(inner, layer + "fc2");
  }
  Rows gate = Linear(x, layer + "mlp.gate_proj");
  const Rows up = Linear(x, layer + "mlp.up_proj");
  for (size_t row = 0; row < gate.size(); ++row) {
    for (size_t i = 0; i < gate[row].size(); ++i) {
      gate[row][i] *= up[row][i] / (1 + std::exp(-gate[row][i]));
    }
  }
  return Linear(gate, layer + "mlp.down_proj");
}

std::vector<std::vector<double>> ReferenceDecoder::Logits(std::span<const int32_t> tokens) const {
  const std::string prefix = is_opt_ ? "model.decoder." : "model.";
  const std::vector<double>& table = *Find(prefix + "embed_tokens.weight");
  Rows x;
  for (size_t position = 0; position < tokens.size(); ++position) {
    const auto first = table.begin() +
                       static_cast<std::ptrdiff_t>(static_cast<size_t>(tokens[position]) * hidden_);
    x.emplace_back(first, first + static_cast<std::ptrdiff_t>(hidden_));
    if (!is_opt_) continue;
    const std::vector<double>& positions = *Find(prefix + "embed_positions.weight");
    for (size_t i = 0; i < hidden_; ++i) x.back()[i] += positions[(position + 2) * hidden_ + i];
  }
  const auto add = [&](const Rows& more) {
    for (size_t row = 0; row < x.size(); ++row) {
      for (size_t i = 0; i < hidden_; ++i) x[row][i] += more[row][i];
    }
  };
  for (size_t index = 0; index < layers_; ++index) {
    const std::string layer = prefix + "layers." + std::to_string(index) + ".";
    add(Attention(Norm(x, layer + (is_opt_ ? "self_attn_layer_norm" : "input_layernorm")), layer));
    add(Mlp(Norm(x, layer + (is_opt_ ? "final_layer_norm" : "post_attention_layernorm")), layer));
  }
  x = Norm(x, prefix + (is_opt_ ? "final_layer_norm" : "norm"));
  if (Find("lm_head.weight") != nullptr) return Linear(x, "lm_head");
  return Linear(x, prefix + "embed_tokens");
}

}  // namespace flashquant
