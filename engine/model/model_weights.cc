#include "engine/model/model_weights.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "engine/model/model_layout.h"
#include "engine/model/weight_reader.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// Reading and checking keep up with a GPU's packing from about here on.
constexpr unsigned kMaxReaders = 8;

class WeightLoader final {
 public:
  WeightLoader(const WeightReader* reader, std::vector<LinearShape> shapes, Backend* backend)
      : reader_(reader),
        shapes_(shapes),
        backend_(backend),
        read_ahead_(reader, std::move(shapes), NumReaders()) {}

  // The next linear layer of the shapes, its parts joined along N.
  absl::StatusOr<std::unique_ptr<LinearWeight>> NextLinear() {
    const LinearShape& shape = shapes_[next_++];
    FQ_ASSIGN_OR_RETURN(const LinearStorage storage, read_ahead_.Take());
    std::vector<LinearPart> parts;
    for (const PartStorage& part : storage) parts.push_back(part.part);
    const ScopedTime time(&packing_);
    absl::StatusOr<std::unique_ptr<LinearWeight>> packed = backend_->PackLinear(parts);
    if (!packed.ok()) return Annotate(packed.status(), shape.parts.front().name);
    return packed;
  }

  absl::StatusOr<NormWeight> LoadNorm(const NormShape& shape) {
    NormWeight norm;
    FQ_ASSIGN_OR_RETURN(norm.weight, LoadFloats(shape.name + ".weight", {shape.size}, 0));
    if (!shape.has_bias) return norm;
    FQ_ASSIGN_OR_RETURN(norm.bias, LoadFloats(shape.name + ".bias", {shape.size}, 0));
    return norm;
  }

  // As FP32 on the device, without the first `skipped` elements.
  absl::StatusOr<DeviceBuffer> LoadFloats(const std::string& name, std::vector<int64_t> shape,
                                          int64_t skipped) {
    FQ_ASSIGN_OR_RETURN(const std::vector<float> values, reader_->ReadFloats(name, shape));
    const int64_t num_bytes =
        (static_cast<int64_t>(values.size()) - skipped) * static_cast<int64_t>(sizeof(float));
    const ScopedTime time(&uploading_);
    FQ_ASSIGN_OR_RETURN(DeviceBuffer buffer, backend_->Allocate(num_bytes));
    FQ_RETURN_IF_ERROR(backend_->CopyToDevice(buffer.data(), values.data() + skipped, num_bytes));
    return buffer;
  }

  absl::StatusOr<LayerWeights> NextLayer(const ModelConfig& config, int32_t layer) {
    const auto [input_norm, post_attention_norm] = LayerNorms(config, layer);
    LayerWeights weights;
    FQ_ASSIGN_OR_RETURN(weights.input_norm, LoadNorm(input_norm));
    FQ_ASSIGN_OR_RETURN(weights.post_attention_norm, LoadNorm(post_attention_norm));
    if (config.head_norms) {
      const auto [q_norm, k_norm] = HeadNorms(config, layer);
      FQ_ASSIGN_OR_RETURN(weights.q_norm, LoadFloats(q_norm.name + ".weight", {q_norm.size}, 0));
      FQ_ASSIGN_OR_RETURN(weights.k_norm, LoadFloats(k_norm.name + ".weight", {k_norm.size}, 0));
    }
    const KvScaleNames scales = KvScalesOf(config, layer);
    FQ_ASSIGN_OR_RETURN(weights.kv_scales.k, reader_->ReadKvScale(scales.k));
    FQ_ASSIGN_OR_RETURN(weights.kv_scales.v, reader_->ReadKvScale(scales.v));
    FQ_ASSIGN_OR_RETURN(weights.qkv, NextLinear());
    FQ_ASSIGN_OR_RETURN(weights.output, NextLinear());
    FQ_ASSIGN_OR_RETURN(weights.gate_up, NextLinear());
    FQ_ASSIGN_OR_RETURN(weights.down, NextLinear());
    return weights;
  }

  LoadSeconds times() const {
    LoadSeconds times = reader_->times();
    times.pack = packing_.seconds();
    times.upload = uploading_.seconds();
    return times;
  }

 private:
  static int NumReaders() {
    return static_cast<int>(std::clamp(std::thread::hardware_concurrency() / 2, 1u, kMaxReaders));
  }

  const WeightReader* const reader_;
  const std::vector<LinearShape> shapes_;
  Backend* const backend_;
  LinearReadAhead read_ahead_;
  size_t next_ = 0;
  TimeSum packing_;
  TimeSum uploading_;
};

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
  const TensorSource& tensors = *checkpoint.tensors;
  // No backend looks rows up in INT4; found out by a request, it would end the engine.
  const std::string embedding = EmbeddingShape(config).parts[0].name;
  if (IsQuantizedLinear(tensors, embedding)) {
    return UnimplementedError("tensor {}.qweight: an INT4 embedding table is not supported",
                              embedding);
  }
  const bool has_head = HasOwnHead(tensors, config);
  std::vector<LinearShape> shapes = {EmbeddingShape(config)};
  if (has_head) shapes.push_back(HeadShape(config));
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    for (LinearShape& shape : LayerLinears(config, layer)) shapes.push_back(std::move(shape));
  }
  const WeightReader reader(tensors, config);
  WeightLoader loader(&reader, std::move(shapes), backend);
  ModelWeights weights;
  FQ_ASSIGN_OR_RETURN(weights.embedding, loader.NextLinear());
  if (has_head) {
    FQ_ASSIGN_OR_RETURN(weights.own_lm_head, loader.NextLinear());
  }
  FQ_ASSIGN_OR_RETURN(weights.final_norm, loader.LoadNorm(FinalNorm(config)));
  if (config.family == DecoderFamily::kOpt) {
    FQ_ASSIGN_OR_RETURN(
        weights.positions,
        loader.LoadFloats(std::string(kPositionsName),
                          {config.max_position + kOptPositionOffset, config.hidden_size},
                          int64_t{kOptPositionOffset} * config.hidden_size));
  }
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    FQ_ASSIGN_OR_RETURN(LayerWeights layer_weights, loader.NextLayer(config, layer));
    weights.layers.push_back(std::move(layer_weights));
    if (progress) progress(layer + 1, config.num_layers);
  }
  weights.load_seconds = loader.times();
  return weights;
}

}  // namespace flashquant
