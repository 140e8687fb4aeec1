#include "engine/checkpoint/quantized_tensors.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/json.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/tile_coo_validate.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxDimension = std::numeric_limits<int32_t>::max();

// "1.0" -> {1, 0}; nullopt for anything but two short numbers.
std::optional<std::array<int32_t, 2>> ParseVersion(std::string_view text) {
  std::array<int32_t, 2> parts = {0, 0};
  size_t part = 0;
  size_t num_digits = 0;
  for (const char c : text) {
    if (c == '.' && part == 0 && num_digits > 0) {
      part = 1;
      num_digits = 0;
    } else if (c >= '0' && c <= '9' && ++num_digits <= 4) {
      parts[part] = parts[part] * 10 + (c - '0');
    } else {
      return std::nullopt;
    }
  }
  if (part != 1 || num_digits == 0) return std::nullopt;
  return parts;
}

// The minor version, of a file that we can read.
absl::StatusOr<int32_t> CheckVersion(const JsonObject& section) {
  FQ_ASSIGN_OR_RETURN(const std::string method, section.GetString("quant_method"));
  if (method != kQuantMethod) {
    return UnimplementedError("{}: quant_method: not supported (need {}, got {})", section.where(),
                              kQuantMethod, PrintableName(method));
  }
  FQ_ASSIGN_OR_RETURN(const std::string text, section.GetString("format_version"));
  const std::optional<std::array<int32_t, 2>> version = ParseVersion(text);
  if (!version.has_value() || (*version)[0] != 1) {
    return UnimplementedError("{}: format_version: unsupported version {} (need 1.x)",
                              section.where(), PrintableName(text));
  }
  return (*version)[1];
}

absl::Status ReadGeometry(const JsonObject& section, int32_t minor_version,
                          TileCooGeometry* geometry) {
  const auto read = [&](std::string_view key, int32_t fallback) -> absl::StatusOr<int32_t> {
    FQ_ASSIGN_OR_RETURN(const int64_t value, section.GetIntOr(key, fallback, 1, 4096));
    return static_cast<int32_t>(value);
  };
  FQ_ASSIGN_OR_RETURN(geometry->tile_k, read("tile_k", geometry->tile_k));
  FQ_ASSIGN_OR_RETURN(geometry->tile_n, read("tile_n", geometry->tile_n));
  FQ_ASSIGN_OR_RETURN(geometry->buckets_per_tile,
                      read("buckets_per_tile", geometry->buckets_per_tile));
  FQ_ASSIGN_OR_RETURN(const std::string semantics, section.GetStringOr("semantics", "replace"));
  if (semantics != "replace" && semantics != "residual") {
    return section.Error(
        "semantics", fmt::format("must be replace or residual (got {})", PrintableName(semantics)));
  }
  geometry->semantics =
      semantics == "replace" ? TileCooSemantics::kReplace : TileCooSemantics::kResidual;
  FQ_ASSIGN_OR_RETURN(int64_t hint, section.GetIntOr("order_hint", 0, 0, 255));
  // A hint only promises an order; a later minor version may know more of them.
  if (hint > 2 && minor_version > 0) hint = 0;
  if (hint > 2) {
    return section.Error("order_hint", fmt::format("out of range (limit 0..2, got {})", hint));
  }
  geometry->order_hint = static_cast<TileCooOrderHint>(hint);
  TileCooGeometry probe = *geometry;
  probe.k = probe.n = 1;
  return Annotate(ValidateTileCooGeometry(probe), section.where());
}

// A value at or above 2^63 reads as a negative number, and is refused as such.
bool IsDimension(const nlohmann::json& value) {
  return value.is_number_integer() && value.get<int64_t>() >= 1 &&
         value.get<int64_t>() <= kMaxDimension;
}

absl::Status ReadTrueShapes(const JsonObject& section, nlohmann::json* true_shapes) {
  if (!section.Has("true_shapes")) return absl::OkStatus();
  FQ_ASSIGN_OR_RETURN(const JsonObject shapes, section.GetObject("true_shapes"));
  for (const auto& [layer, shape] : shapes.json().items()) {
    const bool good = shape.is_array() && shape.size() == 2 &&
                      std::all_of(shape.begin(), shape.end(), IsDimension);
    if (!good) return shapes.Error(layer, "must be [N, K]");
  }
  *true_shapes = shapes.json();
  return absl::OkStatus();
}

// Reads the tensors of one layer.
class LayerReader {
 public:
  LayerReader(const TensorSource& tensors, const QuantizationConfig& config, std::string_view name)
      : tensors_(tensors), config_(config), name_(name) {}

  absl::StatusOr<Int4Weight> ReadWeight(int64_t n, int64_t k) const {
    Int4Weight weight;
    weight.n = n;
    weight.k = k;
    weight.symmetric = config_.symmetric;
    weight.n_padded = RoundUp<int64_t>(n, kRowMultiple);
    weight.k_padded = RoundUp<int64_t>(k, config_.group_size == -1 ? 2 : config_.group_size);
    weight.group_size = config_.group_size == -1 ? weight.k_padded : config_.group_size;
    FQ_RETURN_IF_ERROR(CheckTrueShape(weight));
    const int64_t groups = weight.groups_per_row();
    FQ_RETURN_IF_ERROR(
        Read(kCodesSuffix, DType::kU8, {weight.n_padded, weight.k_padded / 2}, &weight.qweight));
    FQ_RETURN_IF_ERROR(
        Read(kScalesSuffix, DType::kBF16, {weight.n_padded, groups}, &weight.scales));
    if (!config_.symmetric) {
      FQ_RETURN_IF_ERROR(Read(kZerosSuffix, DType::kU8, {weight.n_padded, groups}, &weight.zeros));
    } else if (Has(kZerosSuffix)) {
      return DataLossError("tensor {}{}: there although the checkpoint is symmetric", name_,
                           kZerosSuffix);
    }
    FQ_RETURN_IF_ERROR(Annotate(ValidateInt4Weight(weight), name_));
    return weight;
  }

  // nullopt when the layer has none.
  absl::StatusOr<std::optional<TileCooMatrix>> ReadOutliers(int64_t n, int64_t k) const {
    if (!Has(kTileIndptrSuffix) && !Has(kBucketInfoSuffix) && !Has(kRecordsSuffix)) {
      return std::optional<TileCooMatrix>();
    }
    TileCooGeometry geometry = config_.geometry;
    geometry.n = n;
    geometry.k = k;
    const int64_t num_tiles = geometry.num_tiles();
    TileCooArrays arrays;
    FQ_RETURN_IF_ERROR(Read(kTileIndptrSuffix, DType::kU32, {num_tiles + 1}, &arrays.tile_indptr));
    FQ_RETURN_IF_ERROR(Read(kBucketInfoSuffix, DType::kU16,
                            {num_tiles, geometry.buckets_per_tile, 2}, &arrays.bucket_info));
    FQ_RETURN_IF_ERROR(
        Read(kRecordsSuffix, DType::kU8, {kAnySize, sizeof(TileCooRecord)}, &arrays.records));
    absl::StatusOr<TileCooMatrix> matrix = TileCooMatrix::Create(geometry, std::move(arrays));
    if (!matrix.ok()) return Annotate(matrix.status(), name_);
    return std::optional<TileCooMatrix>(*std::move(matrix));
  }

 private:
  static constexpr int64_t kAnySize = -1;

  bool Has(std::string_view suffix) const {
    return tensors_.Find(fmt::format("{}{}", name_, suffix)) != nullptr;
  }

  // A padded layer must be named with its true shape, and a named one must have that shape.
  absl::Status CheckTrueShape(const Int4Weight& weight) const {
    const auto entry = config_.true_shapes.find(name_);
    if (entry == config_.true_shapes.end()) {
      if (weight.n == weight.n_padded && weight.k == weight.k_padded) return absl::OkStatus();
      return DataLossError(
          "config.json: quantization_config: true_shapes: {} missing (padded from [{}, {}])", name_,
          weight.n, weight.k);
    }
    if ((*entry)[0].get<int64_t>() == weight.n && (*entry)[1].get<int64_t>() == weight.k) {
      return absl::OkStatus();
    }
    return DataLossError(
        "config.json: quantization_config: true_shapes: {} (need [{}, {}], got {})", name_,
        weight.n, weight.k, entry->dump());
  }

  template <typename Element>
  absl::Status Read(std::string_view suffix, DType dtype, std::span<const int64_t> shape,
                    std::vector<Element>* out) const {
    const std::string tensor_name = fmt::format("{}{}", name_, suffix);
    const TensorInfo* const info = tensors_.Find(tensor_name);
    if (info == nullptr) return DataLossError("missing tensor {}", tensor_name);
    if (info->dtype != dtype) {
      return DataLossError("tensor {}: dtype (need {}, got {})", tensor_name, DTypeName(dtype),
                           DTypeName(info->dtype));
    }
    const bool fits =
        std::equal(shape.begin(), shape.end(), info->shape.begin(), info->shape.end(),
                   [](int64_t need, int64_t got) { return need == kAnySize || need == got; });
    if (!fits) {
      return DataLossError("tensor {}: shape (need [{}], got [{}])", tensor_name,
                           fmt::join(shape, ", "), fmt::join(info->shape, ", "));
    }
    if (IsCheckedAtLoad(tensor_name) && !tensors_.IsGenerated() &&
        !tensors_.StoredChecksum(*info).has_value()) {
      return DataLossError("tensor {}: checksum missing in the file's metadata", tensor_name);
    }
    // The header's shapes fit the file's real size, so this allocates no more than the file holds.
    out->resize(static_cast<size_t>(info->num_bytes) / sizeof(Element));
    return tensors_.Read(*info, out->data());
  }
  template <typename Element>
  absl::Status Read(std::string_view suffix, DType dtype, std::initializer_list<int64_t> shape,
                    std::vector<Element>* out) const {
    return Read(suffix, dtype, std::span<const int64_t>(shape.begin(), shape.size()), out);
  }

  const TensorSource& tensors_;
  const QuantizationConfig& config_;
  const std::string name_;
};

}  // namespace

absl::StatusOr<std::optional<QuantizationConfig>> ParseQuantizationConfig(
    const nlohmann::json& config) {
  FQ_ASSIGN_OR_RETURN(const JsonObject root, JsonObject::Create(config, "config.json"));
  if (!root.Has("quantization_config")) return std::optional<QuantizationConfig>();
  FQ_ASSIGN_OR_RETURN(const JsonObject section, root.GetObject("quantization_config"));
  QuantizationConfig result;
  FQ_ASSIGN_OR_RETURN(const int32_t minor_version, CheckVersion(section));
  FQ_RETURN_IF_ERROR(section.GetInt("bits", 4, 4).status());
  FQ_ASSIGN_OR_RETURN(result.group_size, section.GetInt("group_size", -1, 128));
  FQ_RETURN_IF_ERROR(ReadGeometry(section, minor_version, &result.geometry));
  const bool known = result.group_size == -1 || result.group_size == 32 ||
                     result.group_size == 64 || result.group_size == 128;
  if (!known || (result.group_size > 0 && result.geometry.tile_k % result.group_size != 0)) {
    return section.Error("group_size",
                         fmt::format("must be 32, 64, 128 or -1 and divide tile_k (limit {}, got "
                                     "{})",
                                     result.geometry.tile_k, result.group_size));
  }
  FQ_ASSIGN_OR_RETURN(result.symmetric, section.GetBool("symmetric"));
  FQ_ASSIGN_OR_RETURN(result.target_density, section.GetDoubleOr("target_density", 0, 0, 1));
  FQ_ASSIGN_OR_RETURN(result.stored_density, section.GetDoubleOr("stored_density", 0, 0, 1));
  FQ_ASSIGN_OR_RETURN(result.method, section.GetStringOr("method", ""));
  FQ_RETURN_IF_ERROR(ReadTrueShapes(section, &result.true_shapes));
  return std::optional<QuantizationConfig>(std::move(result));
}

nlohmann::json QuantizationConfigJson(const QuantizationConfig& config) {
  nlohmann::json section = {
      {"quant_method", std::string(kQuantMethod)},
      {"format_version", std::string(kFormatVersion)},
      {"bits", 4},
      {"group_size", config.group_size},
      {"symmetric", config.symmetric},
      {"tile_k", config.geometry.tile_k},
      {"tile_n", config.geometry.tile_n},
      {"buckets_per_tile", config.geometry.buckets_per_tile},
      {"semantics",
       config.geometry.semantics == TileCooSemantics::kReplace ? "replace" : "residual"},
      {"order_hint", static_cast<int>(config.geometry.order_hint)},
      {"method", config.method},
      {"target_density", config.target_density},
      {"stored_density", config.stored_density}};
  if (!config.true_shapes.empty()) section["true_shapes"] = config.true_shapes;
  return section;
}

WeightBytes CountWeightBytes(const TensorSource& tensors) {
  WeightBytes bytes;
  for (const TensorInfo& tensor : tensors.tensors()) {
    const auto is_one_of = [&tensor](std::initializer_list<std::string_view> suffixes) {
      return std::any_of(suffixes.begin(), suffixes.end(), [&tensor](std::string_view suffix) {
        return tensor.name.ends_with(suffix);
      });
    };
    int64_t* kind = &bytes.dense;
    if (is_one_of({kCodesSuffix})) kind = &bytes.codes;
    if (is_one_of({kScalesSuffix, kZerosSuffix, kTableScaleSuffix})) kind = &bytes.scales;
    if (is_one_of({kTileIndptrSuffix, kBucketInfoSuffix, kRecordsSuffix})) kind = &bytes.outliers;
    *kind += tensor.num_bytes;
  }
  return bytes;
}

bool IsQuantizedLinear(const TensorSource& tensors, std::string_view name) {
  return tensors.Find(fmt::format("{}{}", name, kCodesSuffix)) != nullptr;
}

absl::StatusOr<QuantizedLinearTensors> ReadQuantizedLinear(const TensorSource& tensors,
                                                           const QuantizationConfig& config,
                                                           std::string_view name, int64_t n,
                                                           int64_t k) {
  if (n < 1 || n > kMaxDimension || k < 1 || k > kMaxDimension) {
    return DataLossError("{}: shape [{}, {}] (limit 1..{})", name, n, k, kMaxDimension);
  }
  const LayerReader reader(tensors, config, name);
  FQ_ASSIGN_OR_RETURN(Int4Weight weight, reader.ReadWeight(n, k));
  FQ_ASSIGN_OR_RETURN(std::optional<TileCooMatrix> outliers, reader.ReadOutliers(n, k));
  if (outliers.has_value()) {
    FQ_RETURN_IF_ERROR(Annotate(ValidateOutliersAgainstInt4(weight, *outliers), name));
  }
  return QuantizedLinearTensors{std::move(weight), std::move(outliers)};
}

}  // namespace flashquant
