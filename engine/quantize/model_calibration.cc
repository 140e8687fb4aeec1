#include "engine/quantize/model_calibration.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "engine/model/model_layout.h"
#include "engine/model/rope_table.h"
#include "engine/model/weight_reader.h"
#include "engine/quantize/parallel_for.h"
#include "kernels/base/check.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int32_t kBlockTokens = 16;
constexpr int32_t kDefaultContext = 2048;
constexpr int32_t kAttentionOutput = 1;
constexpr int64_t kConvertedAtOnce = int64_t{1} << 18;

const LinearWeight* JoinedWeight(const LayerWeights& weights, int32_t part) {
  const LinearWeight* const joined[] = {weights.qkv.get(), weights.output.get(),
                                        weights.gate_up.get(), weights.down.get()};
  return joined[part];
}

// Values as a backend with activations of `dtype`, F32 or BF16, holds them.
void WriteAs(DType dtype, std::span<const float> values, uint8_t* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, values.data(), values.size_bytes());
    return;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const BFloat16 rounded = ToBFloat16(values[i]);
    std::memcpy(out + i * sizeof(rounded), &rounded, sizeof(rounded));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelCalibration>> ModelCalibration::Create(
    const Checkpoint& checkpoint, std::span<const int32_t> tokens,
    const ModelCalibrationOptions& options) {
  std::unique_ptr<ModelCalibration> calibration(new ModelCalibration(checkpoint, options));
  FQ_RETURN_IF_ERROR(calibration->Init(tokens));
  return calibration;
}

absl::Status ModelCalibration::Init(std::span<const int32_t> tokens) {
  FQ_ASSIGN_OR_RETURN(config_, ParseModelConfig(checkpoint_));
  context_ =
      options_.context > 0 ? options_.context : std::min(kDefaultContext, config_.max_position);
  if (context_ > config_.max_position) {
    return InvalidArgumentError("calibration: context of {} tokens (limit {})", context_,
                                config_.max_position);
  }
  const int64_t there = static_cast<int64_t>(tokens.size()) - options_.first_token;
  const int64_t wanted = options_.num_tokens > 0 ? std::min(there, options_.num_tokens) : there;
  num_windows_ = wanted / context_;
  if (num_windows_ < 1) {
    return InvalidArgumentError(
        "calibration: {} has {} tokens from number {} on, of which {} are to be used (one window "
        "needs {})",
        options_.text_path, std::max<int64_t>(there, 0), options_.first_token,
        std::max<int64_t>(wanted, 0), context_);
  }
  tokens = tokens.subspan(static_cast<size_t>(options_.first_token),
                          static_cast<size_t>(num_windows_ * context_));
  for (const int32_t id : tokens) {
    if (id < 0 || id >= config_.vocab_size) {
      return InvalidArgumentError("calibration: token id out of range (limit {}, got {})",
                                  config_.vocab_size - 1, id);
    }
  }
  tokens_checksum_ = Crc32c(tokens.data(), tokens.size_bytes());
  NameLayers();
  FQ_RETURN_IF_ERROR(PrepareBackend());
  tokens_.assign(tokens.begin(), tokens.end());
  return Embed();
}

absl::Status ModelCalibration::Restart() {
  attention_is_known_ = false;
  model_.reset();
  stale_parts_.clear();
  quantized_.clear();
  collected_ = {-1, -1};
  current_layer_ = 0;
  return Embed();
}

// What a forward pass over one window needs.
absl::Status ModelCalibration::PrepareBackend() {
  layer_config_ = config_;
  layer_config_.num_layers = 1;
  layer_config_.vocab_size = 1;
  layer_config_.tie_word_embeddings = true;
  FQ_ASSIGN_OR_RETURN(device_, OpenQuantizerDevice(options_.backend, options_.num_threads));
  Backend* const backend = device_.backend.get();
  observed_ = std::make_unique<ObservedBackend>(backend);
  rope_table_ = MakeRopeTable(config_, static_cast<int32_t>(context_));
  const auto rows = static_cast<int32_t>(context_);
  const int32_t num_blocks = CeilDiv(rows, kBlockTokens);
  FQ_ASSIGN_OR_RETURN(cache_, KvCache::Create(backend, {.num_layers = 1,
                                                        .num_blocks = num_blocks + 1,
                                                        .block_tokens = kBlockTokens,
                                                        .num_kv_heads = config_.num_kv_heads,
                                                        .head_dim = config_.head_dim}));
  FQ_ASSIGN_OR_RETURN(activations_, Activations::Create(backend, layer_config_, rows, 1));
  FQ_ASSIGN_OR_RETURN(batch_, BatchInput::Create(backend, {.max_rows = rows,
                                                           .max_sequences = 1,
                                                           .max_blocks = num_blocks,
                                                           .block_tokens = kBlockTokens}));
  std::vector<int32_t> indices(static_cast<size_t>(context_));
  std::iota(indices.begin(), indices.end(), 0);
  const int64_t index_bytes = context_ * static_cast<int64_t>(sizeof(int32_t));
  FQ_ASSIGN_OR_RETURN(row_indices_, backend->Allocate(index_bytes));
  FQ_RETURN_IF_ERROR(backend->CopyToDevice(row_indices_.data(), indices.data(), index_bytes));
  // All windows look alike to the layers: positions 0 .. context - 1 in the same blocks.
  const std::vector<int32_t> no_tokens(static_cast<size_t>(context_), 0);
  std::vector<int32_t> block_ids(static_cast<size_t>(num_blocks));
  std::iota(block_ids.begin(), block_ids.end(), 1);
  StepPlan plan;
  plan.num_tokens = rows;
  plan.num_rows = rows;
  plan.phase = StepPhase::kPrefill;
  plan.sequences.push_back({.token_ids = no_tokens, .block_ids = block_ids});
  return batch_->Load(plan);
}

void ModelCalibration::NameLayers() {
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    int32_t part = 0;
    for (const LinearShape& shape : LayerLinears(config_, layer)) {
      for (const LinearPartShape& linear : shape.parts) {
        layer_names_.push_back(linear.name);
        stages_[linear.name] = {layer, part};
      }
      ++part;
    }
  }
  layer_names_.emplace_back("lm_head");
  stages_["lm_head"] = {config_.num_layers, 0};
}

// Row by row from the file: the table itself is never in memory.
absl::Status ModelCalibration::Embed() {
  const std::string name = EmbeddingShape(config_).parts[0].name + ".weight";
  const TensorInfo* table = checkpoint_.tensors->Find(name);
  if (table == nullptr) return DataLossError("tensor {}: missing", name);
  const int64_t hidden = config_.hidden_size;
  if (table->shape != std::vector<int64_t>{config_.vocab_size, hidden}) {
    return DataLossError("tensor {}: wrong shape (needs [{}, {}], got [{}])", name,
                         config_.vocab_size, hidden, fmt::join(table->shape, ", "));
  }
  const DType dtype = device_.backend->info().activation_dtype;
  if (dtype != DType::kF32 && dtype != DType::kBF16) {
    return UnimplementedError("calibration: activations of type {}", DTypeName(dtype));
  }
  element_bytes_ = DTypeBytes(dtype);
  const int64_t window_bytes = context_ * hidden * element_bytes_;
  const int64_t num_bytes = num_windows_ * window_bytes;
  constexpr int64_t kMaxResidualBytes = int64_t{1} << 36;
  if (num_bytes > kMaxResidualBytes) {
    return ResourceExhaustedError("calibration: {} tokens need {} MiB (limit {} MiB)",
                                  tokens_.size(), num_bytes >> 20, kMaxResidualBytes >> 20);
  }
  if (residual_.num_bytes() != num_bytes) {
    FQ_ASSIGN_OR_RETURN(residual_, device_.backend->Allocate(num_bytes));
    FQ_ASSIGN_OR_RETURN(attention_, device_.backend->Allocate(num_tokens() * config_.num_heads *
                                                              config_.head_dim * element_bytes_));
  }
  FQ_ASSIGN_OR_RETURN(const std::vector<float> positions, ReadPositions());
  std::vector<float> row(static_cast<size_t>(hidden));
  std::vector<uint8_t> window(static_cast<size_t>(window_bytes));
  for (size_t i = 0; i < tokens_.size(); ++i) {
    FQ_RETURN_IF_ERROR(checkpoint_.tensors->ReadRowsAsFloat(*table, tokens_[i], 1, row.data()));
    const int64_t in_window = static_cast<int64_t>(i) % context_;
    if (!positions.empty()) {
      const size_t at = static_cast<size_t>(in_window) * row.size();
      for (size_t j = 0; j < row.size(); ++j) row[j] += positions[at + j];
    }
    WriteAs(dtype, row, window.data() + in_window * hidden * element_bytes_);
    if (in_window + 1 < context_) continue;
    FQ_RETURN_IF_ERROR(device_.backend->CopyToDevice(
        residual_.As<uint8_t>() + static_cast<int64_t>(i) / context_ * window_bytes, window.data(),
        window_bytes));
  }
  return absl::OkStatus();
}

// Learned positions of a window; empty for a model that has none.
absl::StatusOr<std::vector<float>> ModelCalibration::ReadPositions() const {
  std::vector<float> positions;
  if (config_.family != DecoderFamily::kOpt) return positions;
  const TensorInfo* table = checkpoint_.tensors->Find(kPositionsName);
  const std::vector<int64_t> shape = {config_.max_position + kOptPositionOffset,
                                      config_.hidden_size};
  if (table == nullptr || table->shape != shape) {
    return DataLossError("tensor {}: missing or not [{}]", kPositionsName, fmt::join(shape, ", "));
  }
  positions.resize(static_cast<size_t>(context_ * config_.hidden_size));
  FQ_RETURN_IF_ERROR(
      checkpoint_.tensors->ReadRowsAsFloat(*table, kOptPositionOffset, context_, positions.data()));
  return positions;
}

absl::StatusOr<const DecoderModel*> ModelCalibration::CurrentModel() {
  if (model_ == nullptr) {
    FQ_ASSIGN_OR_RETURN(model_, LoadLayer());
    stale_parts_.clear();
  }
  for (const int32_t part : stale_parts_) FQ_RETURN_IF_ERROR(ReloadLinear(part));
  stale_parts_.clear();
  return model_.get();
}

absl::StatusOr<std::unique_ptr<DecoderModel>> ModelCalibration::LoadLayer() {
  Checkpoint one;
  one.path = checkpoint_.path;
  one.tensors =
      std::make_unique<LayerSource>(*checkpoint_.tensors, config_, current_layer_, quantized_);
  layer_config_.sliding_windows = {config_.sliding_window(current_layer_)};
  absl::StatusOr<std::unique_ptr<DecoderModel>> model =
      DecoderModel::Load(one, layer_config_, rope_table_, observed_.get(), nullptr);
  if (model.ok()) return model;
  // The model of one layer calls it layer 0.
  std::string message(model.status().message());
  const std::string own = fmt::format("{}layers.0.", NamePrefix(config_.family));
  if (const size_t at = message.find(own); at != std::string::npos) {
    message.replace(at, own.size(),
                    fmt::format("{}layers.{}.", NamePrefix(config_.family), current_layer_));
  }
  return absl::Status(model.status().code(), "calibration: " + message);
}

absl::Status ModelCalibration::ReloadLinear(int32_t part) {
  const LayerSource source(*checkpoint_.tensors, config_, current_layer_, quantized_);
  const WeightReader reader(source, layer_config_);
  const LinearShape shape = LayerLinears(layer_config_, 0)[static_cast<size_t>(part)];
  FQ_ASSIGN_OR_RETURN(const LinearStorage storage, reader.ReadLinear(shape));
  std::vector<LinearPart> parts;
  for (const PartStorage& one : storage) parts.push_back(one.part);
  FQ_ASSIGN_OR_RETURN(std::unique_ptr<LinearWeight> weight, observed_->PackLinear(parts));
  model_->ReplaceLinear(0, part, std::move(weight));
  return absl::OkStatus();
}

absl::Status ModelCalibration::RunWindows(const DecoderModel& model, const AfterWindow& after) {
  const int64_t residual_bytes = residual_.num_bytes() / num_windows_;
  const int64_t attention_bytes = attention_.num_bytes() / num_windows_;
  for (int64_t window = 0; window < num_windows_; ++window) {
    observed_->SetEmbeddings(residual_.As<uint8_t>() + window * residual_bytes,
                             row_indices_.As<int32_t>());
    observed_->SetAttention(
        attention_is_known_ ? attention_.As<uint8_t>() + window * attention_bytes : nullptr);
    FQ_RETURN_IF_ERROR(model.Forward(*batch_, nullptr, *cache_, activations_.get()));
    if (after) FQ_RETURN_IF_ERROR(after(window));
  }
  return observed_->Synchronize();
}

absl::Status ModelCalibration::StoreWindow(const void* from, int32_t width, int64_t window,
                                           DeviceBuffer* to) {
  // Not through observed_, which leaves out ops once it has seen what it looks for.
  return device_.backend->GatherRows(
      {.num_rows = static_cast<int32_t>(context_),
       .hidden = width,
       .row_indices = row_indices_.As<int32_t>(),
       .in = from,
       .out = to->As<uint8_t>() + window * (to->num_bytes() / num_windows_)});
}

// Brings the residual stream to the input of `layer`.
absl::Status ModelCalibration::AdvanceTo(int32_t layer) {
  const AfterWindow store = [&](int64_t window) {
    return StoreWindow(activations_->residual.data(), config_.hidden_size, window, &residual_);
  };
  while (current_layer_ < layer) {
    FQ_ASSIGN_OR_RETURN(const DecoderModel* model, CurrentModel());
    observed_->Observe(nullptr, nullptr);
    FQ_RETURN_IF_ERROR(RunWindows(*model, store));
    model_.reset();
    stale_parts_.clear();
    quantized_.clear();
    attention_is_known_ = false;
    ++current_layer_;
  }
  return absl::OkStatus();
}

absl::Status ModelCalibration::Collect(const Stage& stage) {
  collected_ = {-1, -1};
  FQ_RETURN_IF_ERROR(AdvanceTo(std::min(stage.layer, config_.num_layers - 1)));
  FQ_ASSIGN_OR_RETURN(const DecoderModel* model, CurrentModel());
  if (stage.layer == config_.num_layers) {
    FQ_RETURN_IF_ERROR(CollectHead(*model));
  } else {
    const LinearWeight* weight = JoinedWeight(model->weights().layers[0], stage.part);
    const bool is_attention = stage.part == kAttentionOutput;
    FQ_RETURN_IF_ERROR(device_.ops->BeginInputs(weight->k()));
    int64_t window = 0;
    observed_->Observe(weight, [&](const void* inputs, int64_t num_rows) {
      FQ_RETURN_IF_ERROR(device_.ops->AddInputs(inputs, num_rows));
      if (!is_attention) return absl::OkStatus();
      return StoreWindow(inputs, static_cast<int32_t>(weight->k()), window++, &attention_);
    });
    FQ_RETURN_IF_ERROR(RunWindows(*model, nullptr));
    attention_is_known_ = attention_is_known_ || is_attention;
  }
  collected_ = stage;
  return absl::OkStatus();
}

// The head's input is the final norm's output.
absl::Status ModelCalibration::CollectHead(const DecoderModel& model) {
  FQ_RETURN_IF_ERROR(device_.ops->BeginInputs(config_.hidden_size));
  observed_->Observe(nullptr, nullptr);
  return RunWindows(model, [&](int64_t) {
    return device_.ops->AddInputs(activations_->hidden.data(), context_);
  });
}

absl::StatusOr<Calibration::Inputs> ModelCalibration::InputsOf(const std::string& layer) {
  const auto found = stages_.find(layer);
  if (found == stages_.end()) return InternalError("calibration: no layer {}", layer);
  const Stage stage = found->second;
  if (stage.layer < current_layer_) {
    return InternalError("calibration: layer {} asked for out of order", layer);
  }
  if (stage.layer != collected_.layer || stage.part != collected_.part) {
    FQ_RETURN_IF_ERROR(Collect(stage));
  }
  return Inputs{device_.ops.get(), int64_t{stage.layer} * 4 + stage.part};
}

absl::Status ModelCalibration::SetQuantized(const std::string& layer, std::vector<float> weights) {
  const auto found = stages_.find(layer);
  if (found == stages_.end()) return InternalError("calibration: no layer {}", layer);
  if (found->second.layer == config_.num_layers) return absl::OkStatus();  // the head
  // A layer taken from a journal has not asked for its inputs.
  FQ_RETURN_IF_ERROR(AdvanceTo(found->second.layer));
  if (found->second.layer != current_layer_) return absl::OkStatus();
  if (found->second.part < kAttentionOutput) attention_is_known_ = false;
  ReplacedWeight& replaced = quantized_[layer];
  // A number has the bits in BF16 here that it would get when it is packed.
  replaced.dtype = device_.backend->info().activation_dtype;
  replaced.bytes.resize(weights.size() * static_cast<size_t>(element_bytes_));
  ParallelFor(options_.num_threads, static_cast<int64_t>(weights.size()), kConvertedAtOnce,
              [&](int64_t begin, int64_t end) {
                WriteAs(replaced.dtype,
                        std::span<const float>(weights).subspan(static_cast<size_t>(begin),
                                                                static_cast<size_t>(end - begin)),
                        replaced.bytes.data() + begin * element_bytes_);
              });
  stale_parts_.insert(found->second.part);
  return absl::OkStatus();
}

std::string ModelCalibration::fingerprint() const {
  return fmt::format("{}, checksum {:08x}, backend {}", description(), tokens_checksum_,
                     device_.ops->name());
}

std::string ModelCalibration::description() const {
  return fmt::format("{} tokens from number {} on, windows of {}", num_tokens(),
                     options_.first_token, context_);
}

}  // namespace flashquant
