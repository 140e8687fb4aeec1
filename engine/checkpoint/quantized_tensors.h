// Tensors of one quantized layer in a checkpoint (design "Tile-COO format", "Checkpoint folder"):
// their names, and reading them into the canonical structs. Writing is checkpoint_writer.h; the
// rules on the bytes themselves are kernels/format.
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

// Layer name + suffix = tensor name.
inline constexpr std::string_view kCodesSuffix = ".qweight";                   // U8 [N, K/2]
inline constexpr std::string_view kScalesSuffix = ".scales";                   // BF16 [N, K/group]
inline constexpr std::string_view kZerosSuffix = ".zeros";                     // U8 [N, K/group]
inline constexpr std::string_view kTileIndptrSuffix = ".outlier_tile_indptr";  // U32 [T + 1]
inline constexpr std::string_view kBucketInfoSuffix = ".outlier_bucket_info";  // U16 [T, B, 2]
inline constexpr std::string_view kRecordsSuffix = ".outlier_groups";          // U8 [G, 16]
// Name of an I8 table + suffix = its row scales, BF16 [rows, 1].
inline constexpr std::string_view kTableScaleSuffix = "_scale";

inline constexpr std::string_view kQuantMethod = "flashquant";
inline constexpr std::string_view kFormatVersion = "1.0";
inline constexpr int64_t kRowMultiple = 8;  // N is padded to it

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
// quant_method, "unsupported version") otherwise.
absl::StatusOr<std::optional<QuantizationConfig>> ParseQuantizationConfig(
    const nlohmann::json& config);

// The object that ParseQuantizationConfig reads back to the same struct; the caller may add members
// ("lm_head", ...).
nlohmann::json QuantizationConfigJson(const QuantizationConfig& config);

struct QuantizedLinearTensors {
  Int4Weight weight;
  std::optional<TileCooMatrix> outliers;
};

// Bytes of all tensors by what they hold.
struct WeightBytes {
  int64_t codes = 0;     // INT4
  int64_t scales = 0;    // scales and zero points, of 8-bit tables too
  int64_t outliers = 0;  // the three arrays of Tile-COO
  int64_t dense = 0;     // the rest: tables, norms, biases, layers that are not quantized
};
WeightBytes CountWeightBytes(const TensorSource& tensors);

// True when `name`.qweight is there.
bool IsQuantizedLinear(const TensorSource& tensors, std::string_view name);

// The layer `name` ("model.layers.0.self_attn.q_proj") of true shape [n, k], every rule of the
// format checked: shapes, checksums (which must be there), Tile-COO validity, codes against
// outliers. DATA_LOSS naming tensor and rule.
absl::StatusOr<QuantizedLinearTensors> ReadQuantizedLinear(const TensorSource& tensors,
                                                           const QuantizationConfig& config,
                                                           std::string_view name, int64_t n,
                                                           int64_t k);

}  // namespace flashquant
