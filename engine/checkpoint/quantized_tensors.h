// Reads one quantized layer's tensors (design "Tile-COO format", "Checkpoint folder") into the
// canonical structs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/checkpoint/tensor_source.h"
#include "kernels/format/int4_weight.h"
#include "kernels/format/tile_coo.h"
#include "nlohmann/json.hpp"

namespace flashquant {

// `quantization_config` of config.json, checked: known quant_method and major version, legal tile
// sizes.
struct QuantizationConfig {
  int64_t group_size = 128;  // -1: one group per row
  bool symmetric = false;
  TileCooGeometry geometry;  // k and n unused
  double target_density = 0;
  double stored_density = 0;
  std::string method;
  nlohmann::json true_shapes =
      nlohmann::json::object();  // layer name -> [N, K] of the padded layers
};

// nullopt when config.json has no quantization_config. DATA_LOSS / UNIMPLEMENTED (another
// quant_method, a future version) otherwise.
absl::StatusOr<std::optional<QuantizationConfig>> ParseQuantizationConfig(
    const nlohmann::json& config);

struct QuantizedLinearTensors {
  Int4Weight weight;
  std::optional<TileCooMatrix> outliers;
};

// True when `name`.qweight is there.
bool IsQuantizedLinear(const TensorSource& tensors, std::string_view name);

// The layer `name` ("model.layers.0.self_attn.q_proj") of true shape [n, k], every rule of the
// format checked: shapes, checksums, Tile-COO validity, codes against outliers. DATA_LOSS naming
// tensor and rule.
absl::StatusOr<QuantizedLinearTensors> ReadQuantizedLinear(const TensorSource& tensors,
                                                           const QuantizationConfig& config,
                                                           std::string_view name, int64_t n,
                                                           int64_t k);

}  // namespace flashquant
