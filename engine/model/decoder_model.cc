#include "engine/model/decoder_model.h"

#include <cmath>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

DecoderModel::DecoderModel(const ModelConfig& config, ModelWeights weights, DeviceBuffer rope_table,
                           Backend* backend)
    : config_(config),
      weights_(std::move(weights)),
      rope_table_(std::move(rope_table)),
      backend_(backend),
      activation_dtype_(backend->info().activation_dtype) {}

absl::StatusOr<std::unique_ptr<DecoderModel>> DecoderModel::Load(const Checkpoint& checkpoint,
                                                                 const ModelConfig& config,
                                                                 std::span<const float> rope_table,
                                                                 Backend* backend,
                                                                 const LoadProgress& progress) {
  FQ_ASSIGN_OR_RETURN(ModelWeights weights,
                      LoadModelWeights(checkpoint, config, backend, progress));
  const auto table_bytes = static_cast<int64_t>(rope_table.size_bytes());
  FQ_ASSIGN_OR_RETURN(DeviceBuffer table, backend->Allocate(table_bytes));
  FQ_RETURN_IF_ERROR(backend->CopyToDevice(table.data(), rope_table.data(), table_bytes));
  return std::unique_ptr<DecoderModel>(
      new DecoderModel(config, std::move(weights), std::move(table), backend));
}

absl::Status DecoderModel::Forward(const BatchInput& batch, const int32_t* previous_tokens,
                                   const KvCache& cache, Activations* activations) const {
  FQ_CHECK(batch.num_rows() <= activations->max_rows);
  FQ_RETURN_IF_ERROR(backend_->Embedding({.num_tokens = batch.num_rows(),
                                          .token_ids = batch.token_ids(),
                                          .previous_rows = batch.previous_rows(),
                                          .previous_tokens = previous_tokens,
                                          .table = weights_.embedding.get(),
                                          .out = activations->residual.data()}));
  if (config_.family == DecoderFamily::kOpt) {
    FQ_RETURN_IF_ERROR(backend_->AddPositions({.num_tokens = batch.num_rows(),
                                               .hidden = config_.hidden_size,
                                               .positions = batch.positions(),
                                               .table = weights_.positions.As<float>(),
                                               .x = activations->residual.data()}));
  }
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    FQ_RETURN_IF_ERROR(DecoderLayer(layer, batch, cache, activations));
  }
  return Norm(batch.num_rows(), weights_.final_norm, /*add_to_residual=*/true, activations);
}

// The residual stream lives in `residual`; each block reads its norm from `hidden` and leaves its
// output there, which the next norm adds to the stream. The first layer has nothing to add yet.
absl::Status DecoderModel::DecoderLayer(int32_t layer, const BatchInput& batch,
                                        const KvCache& cache, Activations* activations) const {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  const int32_t rows = batch.num_rows();
  FQ_RETURN_IF_ERROR(Norm(rows, weights.input_norm, /*add_to_residual=*/layer > 0, activations));
  FQ_RETURN_IF_ERROR(Attention(layer, batch, cache, activations));
  FQ_RETURN_IF_ERROR(
      Norm(rows, weights.post_attention_norm, /*add_to_residual=*/true, activations));
  return Mlp(layer, rows, activations);
}

absl::Status DecoderModel::Attention(int32_t layer, const BatchInput& batch, const KvCache& cache,
                                     Activations* activations) const {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  const int32_t rows = batch.num_rows();
  FQ_RETURN_IF_ERROR(Linear(rows, *weights.qkv, activations->hidden, activations->qkv));
  if (config_.head_norms) {
    FQ_RETURN_IF_ERROR(backend_->HeadNorm({.num_tokens = rows,
                                           .num_heads = config_.num_heads,
                                           .num_kv_heads = config_.num_kv_heads,
                                           .head_dim = config_.head_dim,
                                           .epsilon = config_.norm_epsilon,
                                           .qkv = activations->qkv.data(),
                                           .q_weight = weights.q_norm.data(),
                                           .k_weight = weights.k_norm.data()}));
  }
  const RopeAndKvWriteParams rope = {.num_tokens = rows,
                                     .num_heads = config_.num_heads,
                                     .num_kv_heads = config_.num_kv_heads,
                                     .head_dim = config_.head_dim,
                                     .qkv = activations->qkv.data(),
                                     .positions = batch.positions(),
                                     .slots = batch.slots(),
                                     .cos_sin = rope_table_.As<float>(),
                                     .kv = cache.geometry(),
                                     .kv_scales = weights.kv_scales,
                                     .k_cache = cache.k(layer),
                                     .v_cache = cache.v(layer)};
  FQ_RETURN_IF_ERROR(backend_->RopeAndAttention(
      rope, {.batch = batch.attention(),
             .num_heads = config_.num_heads,
             .num_kv_heads = config_.num_kv_heads,
             .head_dim = config_.head_dim,
             .softmax_scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim)),
             .sliding_window = config_.sliding_window(layer),
             .qkv = activations->qkv.data(),
             .kv = cache.geometry(),
             .kv_scales = weights.kv_scales,
             .k_cache = cache.k(layer),
             .v_cache = cache.v(layer),
             .out = activations->attention.data()}));
  return Linear(rows, *weights.output, activations->attention, activations->hidden);
}

absl::Status DecoderModel::Mlp(int32_t layer, int32_t num_rows, Activations* activations) const {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  FQ_RETURN_IF_ERROR(Linear(num_rows, *weights.gate_up, activations->hidden, activations->gate_up));
  if (config_.family == DecoderFamily::kOpt) {
    FQ_RETURN_IF_ERROR(backend_->Relu({.count = int64_t{num_rows} * config_.intermediate_size,
                                       .x = activations->gate_up.data()}));
    return Linear(num_rows, *weights.down, activations->gate_up, activations->hidden);
  }
  FQ_RETURN_IF_ERROR(backend_->SiluAndMul({.num_rows = num_rows,
                                           .intermediate = config_.intermediate_size,
                                           .gate_up = activations->gate_up.data(),
                                           .out = activations->intermediate.data()}));
  return Linear(num_rows, *weights.down, activations->intermediate, activations->hidden);
}

absl::Status DecoderModel::Norm(int32_t num_rows, const NormWeight& weight, bool add_to_residual,
                                Activations* activations) const {
  const void* x = add_to_residual ? activations->hidden.data() : activations->residual.data();
  void* residual = add_to_residual ? activations->residual.data() : nullptr;
  if (config_.family == DecoderFamily::kOpt) {
    return backend_->LayerNorm({.num_rows = num_rows,
                                .hidden = config_.hidden_size,
                                .epsilon = config_.norm_epsilon,
                                .x = x,
                                .residual = residual,
                                .weight = weight.weight.data(),
                                .bias = weight.bias.data(),
                                .out = activations->hidden.data()});
  }
  return backend_->RmsNorm({.num_rows = num_rows,
                            .hidden = config_.hidden_size,
                            .epsilon = config_.norm_epsilon,
                            .x = x,
                            .residual = residual,
                            .weight = weight.weight.data(),
                            .out = activations->hidden.data()});
}

absl::Status DecoderModel::Linear(int32_t num_rows, const LinearWeight& weight,
                                  const DeviceBuffer& x, const DeviceBuffer& y) const {
  return backend_->Linear({.num_rows = num_rows,
                           .weight = &weight,
                           .x = x.data(),
                           .y = y.data(),
                           .y_dtype = activation_dtype_});
}

absl::Status DecoderModel::ComputeLogits(const int32_t* row_indices, int32_t num_rows,
                                         Activations* activations) const {
  FQ_CHECK(num_rows <= activations->max_logit_rows);
  if (num_rows == 0) return absl::OkStatus();
  const void* x = activations->hidden.data();
  if (row_indices != nullptr) {
    FQ_RETURN_IF_ERROR(backend_->GatherRows({.num_rows = num_rows,
                                             .hidden = config_.hidden_size,
                                             .row_indices = row_indices,
                                             .in = activations->hidden.data(),
                                             .out = activations->logits_input.data()}));
    x = activations->logits_input.data();
  }
  return backend_->Linear({.num_rows = num_rows,
                           .weight = weights_.lm_head(),
                           .x = x,
                           .y = activations->logits.data(),
                           .y_dtype = DType::kF32});
}

}  // namespace flashquant
