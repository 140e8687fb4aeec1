// Words are read as they lie in memory: safetensors and every machine that we run on are little
// endian.
#include "engine/checkpoint/gptq_reader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <span>
#include <utility>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/json.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr std::string_view kCodes = ".qweight";
constexpr std::string_view kZeros = ".qzeros";
constexpr std::string_view kScales = ".scales";
constexpr std::string_view kGroupIndex = ".g_idx";
constexpr std::string_view kWeight = ".weight";
constexpr int64_t kPerWord = 8;  // codes of an I32
constexpr int64_t kMaxDimension = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxGroupSize = 1 << 20;
constexpr uint32_t kOneEach = 0x11111111;

// A [rows, columns] tensor of a layer, there and of that type and shape.
absl::StatusOr<const TensorInfo*> FindPart(const TensorSource& folder, const std::string& name,
                                           std::span<const DType> dtypes,
                                           const std::vector<int64_t>& shape) {
  const TensorInfo* const tensor = folder.Find(name);
  if (tensor == nullptr) return DataLossError("missing tensor {}", name);
  if (std::find(dtypes.begin(), dtypes.end(), tensor->dtype) == dtypes.end()) {
    return DataLossError("tensor {}: dtype (need {}, got {})", name, DTypeName(dtypes[0]),
                         DTypeName(tensor->dtype));
  }
  if (tensor->shape != shape) {
    return DataLossError("tensor {}: shape (need [{}], got [{}])", name, fmt::join(shape, ", "),
                         fmt::join(tensor->shape, ", "));
  }
  return tensor;
}

std::string Lower(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

// "gptqmodel:4.0.0" or a list of such.
bool IsFromGptqModel(const JsonObject& section) {
  const nlohmann::json* const meta = section.Find("meta");
  if (meta == nullptr || !meta->is_object() || !meta->contains("quantizer")) return false;
  const nlohmann::json& quantizer = (*meta)["quantizer"];
  const auto is_it = [](const nlohmann::json& value) {
    return value.is_string() && Lower(value.get<std::string>()).starts_with("gptqmodel");
  };
  if (!quantizer.is_array()) return is_it(quantizer);
  return std::any_of(quantizer.begin(), quantizer.end(), is_it);
}

absl::StatusOr<GptqConfig> ParseSection(const JsonObject& section) {
  FQ_ASSIGN_OR_RETURN(const int64_t bits, section.GetInt("bits", 1, 32));
  if (bits != 4) {
    return UnimplementedError("{}: bits: not supported (need 4, got {})", section.where(), bits);
  }
  GptqConfig config;
  FQ_ASSIGN_OR_RETURN(config.group_size, section.GetInt("group_size", -1, kMaxGroupSize));
  if (config.group_size == 0) return section.Error("group_size", "must be -1 or above 0 (got 0)");
  FQ_ASSIGN_OR_RETURN(const std::string older, section.GetStringOr("format", "gptq"));
  FQ_ASSIGN_OR_RETURN(const std::string format, section.GetStringOr("checkpoint_format", older));
  if (format != "gptq" && format != "gptq_v2") {
    return UnimplementedError("{}: checkpoint_format: not supported (need gptq or gptq_v2, got {})",
                              section.where(), PrintableName(format));
  }
  config.stores_zero_less_one = format == "gptq";
  config.subtracts_from_words = IsFromGptqModel(section);
  FQ_ASSIGN_OR_RETURN(const std::string packing, section.GetStringOr("pack_dtype", "int32"));
  if (packing != "int32") {
    return UnimplementedError("{}: pack_dtype: not supported (need int32, got {})", section.where(),
                              PrintableName(packing));
  }
  FQ_ASSIGN_OR_RETURN(const bool is_marlin, section.GetBoolOr("is_marlin_format", false));
  if (is_marlin) {
    return UnimplementedError("{}: is_marlin_format: not supported; give the GPTQ form",
                              section.where());
  }
  const nlohmann::json* const per_layer = section.Find("dynamic");
  if (per_layer != nullptr && !per_layer->empty()) {
    return UnimplementedError("{}: dynamic: options per layer are not supported", section.where());
  }
  return config;
}

}  // namespace

std::vector<float> GptqLayer::Dequantize() const {
  std::vector<float> weights(static_cast<size_t>(n * k));
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t column = 0; column < k; ++column) {
      const size_t at = static_cast<size_t>(row * k + column);
      const size_t group =
          static_cast<size_t>(row * num_groups + group_of[static_cast<size_t>(column)]);
      weights[at] = scales[group] * static_cast<float>(codes[at] - zeros[group]);
    }
  }
  return weights;
}

absl::StatusOr<std::unique_ptr<GptqTensors>> GptqTensors::Create(
    std::string path, std::unique_ptr<TensorSource> folder, const GptqConfig& config) {
  std::unique_ptr<GptqTensors> tensors(new GptqTensors(std::move(path), std::move(folder), config));
  FQ_RETURN_IF_ERROR(Annotate(tensors->Init(), tensors->path_));
  return tensors;
}

absl::Status GptqTensors::Init() {
  for (const TensorInfo& tensor : folder_->tensors()) {
    if (!tensor.name.ends_with(kCodes)) continue;
    const std::string name = tensor.name.substr(0, tensor.name.size() - kCodes.size());
    FQ_RETURN_IF_ERROR(AddLayer(name, tensor));
  }
  for (const TensorInfo& tensor : folder_->tensors()) {
    const size_t dot = tensor.name.rfind('.');
    const std::string layer = tensor.name.substr(0, dot);
    if (dot == std::string::npos || !layers_.contains(layer)) {
      infos_.push_back(tensor);
      continue;
    }
    const std::string_view part = std::string_view(tensor.name).substr(dot);
    if (part == kWeight) return DataLossError("tensor {}: there are codes for it too", tensor.name);
    constexpr std::array kParts = {kCodes, kZeros, kScales, kGroupIndex};
    if (std::find(kParts.begin(), kParts.end(), part) == kParts.end()) infos_.push_back(tensor);
  }
  for (const auto& [name, layer] : layers_) {
    infos_.push_back(
        {name + std::string(kWeight), DType::kF32, {layer.n, layer.k}, 4 * layer.n * layer.k});
  }
  std::sort(infos_.begin(), infos_.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  if (layers_.empty()) return DataLossError("no tensor *{}, which GPTQ's layers have", kCodes);
  return absl::OkStatus();
}

absl::Status GptqTensors::AddLayer(const std::string& name, const TensorInfo& codes) {
  if (codes.dtype != DType::kI32 || codes.shape.size() != 2 || codes.shape[0] < 1 ||
      codes.shape[1] < 1 || codes.shape[0] > kMaxDimension / kPerWord ||
      codes.shape[1] > kMaxDimension || codes.shape[1] % kPerWord != 0) {
    return DataLossError("tensor {}: need I32 [K/8, N], N a multiple of 8 (got {} [{}])",
                         codes.name, DTypeName(codes.dtype), fmt::join(codes.shape, ", "));
  }
  Layer layer;
  layer.k = codes.shape[0] * kPerWord;
  layer.n = codes.shape[1];
  // Each weight takes four bits of a file: no product of these leaves 64 bits.
  const int64_t num_groups =
      config_.group_size == -1 ? 1 : CeilDiv(layer.k, std::min(config_.group_size, layer.k));
  constexpr std::array kWords = {DType::kI32};
  constexpr std::array kFloats = {DType::kF16, DType::kBF16, DType::kF32};
  const std::string zeros = name + std::string(kZeros);
  const std::string scales = name + std::string(kScales);
  FQ_RETURN_IF_ERROR(FindPart(*folder_, zeros, kWords, {num_groups, layer.n / kPerWord}).status());
  FQ_RETURN_IF_ERROR(FindPart(*folder_, scales, kFloats, {num_groups, layer.n}).status());
  FQ_ASSIGN_OR_RETURN(layer.group_of, ReadGroupOf(name, layer.k, num_groups));
  layers_.emplace(name, std::move(layer));
  return absl::OkStatus();
}

// Empty for contiguous groups; the tensor may be missing then.
absl::StatusOr<std::vector<int32_t>> GptqTensors::ReadGroupOf(const std::string& name, int64_t k,
                                                              int64_t num_groups) const {
  std::vector<int32_t> group_of;
  const std::string tensor_name = name + std::string(kGroupIndex);
  if (folder_->Find(tensor_name) == nullptr) return group_of;
  constexpr std::array kWords = {DType::kI32};
  FQ_ASSIGN_OR_RETURN(const TensorInfo* tensor, FindPart(*folder_, tensor_name, kWords, {k}));
  group_of.resize(static_cast<size_t>(k));
  FQ_RETURN_IF_ERROR(folder_->Read(*tensor, group_of.data()));
  const int64_t group_size = config_.group_size == -1 ? k : config_.group_size;
  bool contiguous = true;
  for (int64_t i = 0; i < k; ++i) {
    const int32_t group = group_of[static_cast<size_t>(i)];
    if (group < 0 || group >= num_groups) {
      return DataLossError("tensor {}: group of input {} (limit {}, got {})", tensor_name, i,
                           num_groups - 1, group);
    }
    contiguous = contiguous && group == i / group_size;
  }
  if (contiguous) group_of.clear();
  return group_of;
}

bool GptqTensors::HasContiguousGroups(std::string_view layer) const {
  const auto found = layers_.find(std::string(layer));
  return found != layers_.end() && found->second.group_of.empty();
}

bool GptqTensors::HasActOrder() const {
  return std::any_of(layers_.begin(), layers_.end(),
                     [](const auto& entry) { return !entry.second.group_of.empty(); });
}

absl::StatusOr<bool> GptqTensors::AllZeroPointsAreEight() const {
  const uint32_t eights = config_.stores_zero_less_one ? 7 * kOneEach : 8 * kOneEach;
  std::vector<uint32_t> words;
  for (const auto& [name, layer] : layers_) {
    const TensorInfo& zeros = *folder_->Find(name + std::string(kZeros));
    words.resize(static_cast<size_t>(zeros.num_bytes) / sizeof(uint32_t));
    FQ_RETURN_IF_ERROR(folder_->Read(zeros, words.data()));
    if (std::any_of(words.begin(), words.end(), [&](uint32_t word) { return word != eights; })) {
      return false;
    }
  }
  return true;
}

absl::Status GptqTensors::UnpackZeros(const std::string& name, GptqLayer* layer) const {
  const std::string tensor_name = name + std::string(kZeros);
  std::vector<uint32_t> words(static_cast<size_t>(layer->num_groups * (layer->n / kPerWord)));
  FQ_RETURN_IF_ERROR(folder_->Read(*folder_->Find(tensor_name), words.data()));
  layer->zeros.resize(static_cast<size_t>(layer->n * layer->num_groups));
  const int64_t words_per_group = layer->n / kPerWord;
  for (size_t i = 0; i < words.size(); ++i) {
    const int64_t group = static_cast<int64_t>(i) / words_per_group;
    const int64_t first_row = static_cast<int64_t>(i) % words_per_group * kPerWord;
    uint32_t word = words[i];
    const bool add_each = config_.stores_zero_less_one && !config_.subtracts_from_words;
    if (config_.stores_zero_less_one && config_.subtracts_from_words) word += kOneEach;
    for (int64_t j = 0; j < kPerWord; ++j) {
      const uint32_t zero = (word >> (4 * j) & 0xf) + (add_each ? 1 : 0);
      if (zero > 15) {
        return UnimplementedError(
            "tensor {}: output {}, group {}: stored zero point 15 of format \"gptq\" (a zero point "
            "of 16, or one of 0 that its packer damaged); save the model as gptq_v2",
            tensor_name, first_row + j, group);
      }
      layer->zeros[static_cast<size_t>((first_row + j) * layer->num_groups + group)] =
          static_cast<uint8_t>(zero);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<GptqLayer> GptqTensors::ReadLayer(std::string_view layer_name) const {
  const std::string name(layer_name);
  const auto found = layers_.find(name);
  if (found == layers_.end()) return DataLossError("missing tensor {}{}", name, kCodes);
  const TensorInfo& scales = *folder_->Find(name + std::string(kScales));
  GptqLayer layer;
  layer.n = found->second.n;
  layer.k = found->second.k;
  layer.num_groups = scales.shape[0];
  layer.group_of = found->second.group_of;
  if (layer.group_of.empty()) {
    layer.group_of.resize(static_cast<size_t>(layer.k));
    const int64_t group_size = config_.group_size == -1 ? layer.k : config_.group_size;
    for (int64_t i = 0; i < layer.k; ++i) {
      layer.group_of[static_cast<size_t>(i)] = static_cast<int32_t>(i / group_size);
    }
  }
  FQ_RETURN_IF_ERROR(UnpackZeros(name, &layer));

  std::vector<float> by_group(static_cast<size_t>(layer.num_groups * layer.n));
  FQ_RETURN_IF_ERROR(folder_->ReadRowsAsFloat(scales, 0, layer.num_groups, by_group.data()));
  layer.scales.resize(by_group.size());
  for (int64_t group = 0; group < layer.num_groups; ++group) {
    for (int64_t row = 0; row < layer.n; ++row) {
      const float scale = by_group[static_cast<size_t>(group * layer.n + row)];
      if (!std::isfinite(scale)) {
        return DataLossError("tensor {}: output {}, group {}: not finite", scales.name, row, group);
      }
      layer.scales[static_cast<size_t>(row * layer.num_groups + group)] = scale;
    }
  }

  std::vector<uint32_t> words(static_cast<size_t>(layer.n));
  layer.codes.resize(static_cast<size_t>(layer.n * layer.k));
  const TensorInfo& codes = *folder_->Find(name + std::string(kCodes));
  for (int64_t eighth = 0; eighth < layer.k / kPerWord; ++eighth) {
    FQ_RETURN_IF_ERROR(folder_->ReadRows(codes, eighth, 1, words.data()));
    for (int64_t row = 0; row < layer.n; ++row) {
      uint8_t* out = layer.codes.data() + row * layer.k + eighth * kPerWord;
      for (int64_t j = 0; j < kPerWord; ++j) {
        out[j] = static_cast<uint8_t>(words[static_cast<size_t>(row)] >> (4 * j) & 0xf);
      }
    }
  }
  return layer;
}

absl::Status GptqTensors::ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                                   void* out) const {
  const std::string_view full_name = tensor.name;
  const std::string name(
      full_name.substr(0, full_name.size() - std::min(full_name.size(), kWeight.size())));
  const auto found = layers_.find(name);
  if (!full_name.ends_with(kWeight) || found == layers_.end()) {
    return folder_->ReadRows(tensor, first_row, num_rows, out);
  }
  const int64_t k = found->second.k;
  if (first_row < 0 || num_rows < 0 || first_row > found->second.n - num_rows) {
    return InternalError("tensor {}: rows {}..+{} (limit {})", tensor.name, first_row, num_rows,
                         found->second.n);
  }
  std::shared_ptr<const std::vector<float>> weights;
  {
    const MutexLock lock(&mutex_);
    if (last_name_ != name) {
      FQ_ASSIGN_OR_RETURN(const GptqLayer layer, ReadLayer(name));
      last_weights_ = std::make_shared<const std::vector<float>>(layer.Dequantize());
      last_name_ = name;
    }
    weights = last_weights_;
  }
  std::memcpy(out, weights->data() + first_row * k, static_cast<size_t>(4 * num_rows * k));
  return absl::OkStatus();
}

absl::StatusOr<Checkpoint> DequantizeIfGptq(Checkpoint checkpoint) {
  nlohmann::json section;
  std::string where = fmt::format("{}/config.json: quantization_config", checkpoint.path);
  std::error_code ignored;
  const std::string older = checkpoint.path + "/quantize_config.json";
  if (checkpoint.config.contains("quantization_config")) {
    section = checkpoint.config["quantization_config"];
    if (!section.is_object() || section.value("quant_method", nlohmann::json()) != "gptq") {
      return checkpoint;
    }
  } else if (std::filesystem::exists(older, ignored)) {
    where = older;
    FQ_ASSIGN_OR_RETURN(section, ReadJsonFile(older));
    FQ_RETURN_IF_ERROR(JsonObject::Create(section, older).status());
    const nlohmann::json method = section.value("quant_method", nlohmann::json("gptq"));
    if (method != "gptq") {
      return UnimplementedError("{}: quant_method: not supported (need gptq, got {})", older,
                                PrintableName(DumpJson(method, -1)));
    }
  } else {
    return checkpoint;
  }
  FQ_ASSIGN_OR_RETURN(const JsonObject object, JsonObject::Create(section, where));
  FQ_ASSIGN_OR_RETURN(const GptqConfig config, ParseSection(object));
  FQ_ASSIGN_OR_RETURN(checkpoint.tensors,
                      GptqTensors::Create(checkpoint.path, std::move(checkpoint.tensors), config));
  checkpoint.config.erase("quantization_config");
  return checkpoint;
}

const GptqTensors* AsGptq(const TensorSource& tensors) {
  return dynamic_cast<const GptqTensors*>(&tensors);
}

}  // namespace flashquant
