#include "engine/model/model_weights.h"

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "engine/model/model_layout.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// Host tensors of one part of a linear layer, kept alive until it is packed.
struct PartStorage {
  std::vector<uint8_t> dense;
  std::vector<uint8_t> row_scales;
  std::vector<uint8_t> bias;
  QuantizedLinearTensors quantized;
  LinearPart part;
};

class WeightLoader {
 public:
  WeightLoader(const Checkpoint& checkpoint, const ModelConfig& config, Backend* backend)
      : tensors_(*checkpoint.tensors), config_(config), backend_(backend) {}

  // A norm's weight, as FP32 on the device.
  absl::StatusOr<DeviceBuffer> LoadNorm(const std::string& name) const {
    FQ_ASSIGN_OR_RETURN(const TensorInfo* info, Require(name, {config_.hidden_size}));
    std::vector<float> values(static_cast<size_t>(config_.hidden_size));
    FQ_RETURN_IF_ERROR(tensors_.ReadRowsAsFloat(*info, 0, info->num_rows(), values.data()));
    const int64_t num_bytes = static_cast<int64_t>(values.size() * sizeof(float));
    FQ_ASSIGN_OR_RETURN(DeviceBuffer buffer, backend_->Allocate(num_bytes));
    FQ_RETURN_IF_ERROR(backend_->CopyToDevice(buffer.data(), values.data(), num_bytes));
    return buffer;
  }

  // The parts, each [n, k], joined along N.
  absl::StatusOr<std::unique_ptr<LinearWeight>> LoadLinear(const LinearShape& shape) const {
    std::vector<PartStorage> storage(shape.parts.size());
    std::vector<LinearPart> parts;
    for (size_t i = 0; i < shape.parts.size(); ++i) {
      FQ_RETURN_IF_ERROR(ReadPart(shape.parts[i], shape.k, &storage[i]));
      parts.push_back(storage[i].part);
    }
    absl::StatusOr<std::unique_ptr<LinearWeight>> packed = backend_->PackLinear(parts);
    if (!packed.ok()) return Annotate(packed.status(), shape.parts.front().name);
    return packed;
  }

  bool IsPresent(std::string_view name) const {
    return tensors_.Find(fmt::format("{}.weight", name)) != nullptr ||
           IsQuantizedLinear(tensors_, name);
  }

 private:
  absl::StatusOr<const TensorInfo*> Require(const std::string& name,
                                            const std::vector<int64_t>& shape) const {
    const TensorInfo* info = tensors_.Find(name);
    if (info == nullptr) return DataLossError("tensor {}: missing", name);
    if (info->shape != shape) {
      return DataLossError("tensor {}: wrong shape (needs [{}], got [{}])", name,
                           fmt::join(shape, ", "), fmt::join(info->shape, ", "));
    }
    return info;
  }

  absl::Status ReadPart(const LinearPartShape& name, int64_t k, PartStorage* storage) const {
    if (name.has_bias) {
      const std::string bias_name = name.name + ".bias";
      FQ_ASSIGN_OR_RETURN(const TensorInfo* info, Require(bias_name, {name.n}));
      if (info->dtype != DType::kBF16) {
        return UnimplementedError("tensor {}: dtype {} (needs BF16)", bias_name,
                                  DTypeName(info->dtype));
      }
      FQ_ASSIGN_OR_RETURN(storage->bias, tensors_.ReadBytes(bias_name));
      storage->part.bias = reinterpret_cast<const BFloat16*>(storage->bias.data());
    }
    if (IsQuantizedLinear(tensors_, name.name)) return ReadQuantizedPart(name, k, storage);
    return ReadDensePart(name, k, storage);
  }

  absl::Status ReadQuantizedPart(const LinearPartShape& name, int64_t k,
                                 PartStorage* storage) const {
    if (!config_.quantization.has_value()) {
      return DataLossError("tensor {}.qweight: config.json has no quantization_config", name.name);
    }
    FQ_ASSIGN_OR_RETURN(storage->quantized,
                        ReadQuantizedLinear(tensors_, *config_.quantization, name.name, name.n, k));
    storage->part.int4 = &storage->quantized.weight;
    if (storage->quantized.outliers.has_value()) {
      storage->part.outliers = &*storage->quantized.outliers;
    }
    return absl::OkStatus();
  }

  absl::Status ReadDensePart(const LinearPartShape& name, int64_t k, PartStorage* storage) const {
    const std::string weight_name = name.name + ".weight";
    FQ_ASSIGN_OR_RETURN(const TensorInfo* info, Require(weight_name, {name.n, k}));
    switch (info->dtype) {
      case DType::kBF16:
      case DType::kF16:
      case DType::kF32:
        break;
      case DType::kI8: {
        const std::string scale_name = weight_name + "_scale";
        FQ_ASSIGN_OR_RETURN(const TensorInfo* scale, Require(scale_name, {name.n, 1}));
        if (scale->dtype != DType::kBF16) {
          return DataLossError("tensor {}: dtype {} (needs BF16)", scale_name,
                               DTypeName(scale->dtype));
        }
        FQ_ASSIGN_OR_RETURN(storage->row_scales, tensors_.ReadBytes(scale_name));
        storage->part.row_scales = reinterpret_cast<const BFloat16*>(storage->row_scales.data());
        for (int64_t row = 0; row < name.n; ++row) {
          if (!IsFinite(storage->part.row_scales[row])) {
            return DataLossError("tensor {}: row {} is not finite", scale_name, row);
          }
        }
        break;
      }
      default:
        return DataLossError("tensor {}: dtype {} (needs BF16, F16, F32 or I8)", weight_name,
                             DTypeName(info->dtype));
    }
    FQ_ASSIGN_OR_RETURN(storage->dense, tensors_.ReadBytes(weight_name));
    storage->part.dense = TensorView{storage->dense.data(), info->dtype, {name.n, k}};
    return absl::OkStatus();
  }

  const TensorSource& tensors_;
  const ModelConfig& config_;
  Backend* const backend_;
};

absl::StatusOr<LayerWeights> LoadLayer(const WeightLoader& loader, const ModelConfig& config,
                                       int32_t layer) {
  const auto [input_norm, post_attention_norm] = LayerNorms(layer);
  const auto linears = LayerLinears(config, layer);
  LayerWeights weights;
  FQ_ASSIGN_OR_RETURN(weights.input_norm, loader.LoadNorm(input_norm));
  FQ_ASSIGN_OR_RETURN(weights.post_attention_norm, loader.LoadNorm(post_attention_norm));
  FQ_ASSIGN_OR_RETURN(weights.qkv, loader.LoadLinear(linears[0]));
  FQ_ASSIGN_OR_RETURN(weights.output, loader.LoadLinear(linears[1]));
  FQ_ASSIGN_OR_RETURN(weights.gate_up, loader.LoadLinear(linears[2]));
  FQ_ASSIGN_OR_RETURN(weights.down, loader.LoadLinear(linears[3]));
  return weights;
}

}  // namespace

int64_t ModelWeights::StepBytes() const {
  int64_t num_bytes = lm_head()->num_bytes();
  for (const LayerWeights& layer : layers) {
    num_bytes += layer.qkv->num_bytes() + layer.output->num_bytes() + layer.gate_up->num_bytes() +
                 layer.down->num_bytes();
  }
  return num_bytes;
}

absl::StatusOr<ModelWeights> LoadModelWeights(const Checkpoint& checkpoint,
                                              const ModelConfig& config, Backend* backend,
                                              const LoadProgress& progress) {
  const WeightLoader loader(checkpoint, config, backend);
  ModelWeights weights;
  // No backend looks rows up in INT4; found out by a request, it would end the engine.
  if (IsQuantizedLinear(*checkpoint.tensors, kEmbeddingName)) {
    return UnimplementedError("tensor {}.qweight: an INT4 embedding table is not supported",
                              kEmbeddingName);
  }
  FQ_ASSIGN_OR_RETURN(weights.embedding, loader.LoadLinear(EmbeddingShape(config)));
  // A tied head may still be stored on its own, as an INT4 layer beside the embedding table.
  if (!config.tie_word_embeddings || loader.IsPresent(kHeadName)) {
    FQ_ASSIGN_OR_RETURN(weights.own_lm_head, loader.LoadLinear(HeadShape(config)));
  }
  FQ_ASSIGN_OR_RETURN(weights.final_norm, loader.LoadNorm(std::string(kFinalNormName)));
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    FQ_ASSIGN_OR_RETURN(LayerWeights layer_weights, LoadLayer(loader, config, layer));
    weights.layers.push_back(std::move(layer_weights));
    if (progress) progress(layer + 1, config.num_layers);
  }
  return weights;
}

}  // namespace flashquant
