// DecoderModel: the forward pass of a Llama- or OPT-style decoder over flat tokens. Knows no
// requests.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/activations.h"
#include "engine/model/batch_input.h"
#include "engine/model/kv_cache.h"
#include "engine/model/model_config.h"
#include "engine/model/model_weights.h"
#include "kernels/backend.h"

namespace flashquant {

// One thread. `backend` must outlive the model.
class DecoderModel final {
 public:
  // Reads and packs the weights. `rope_table`: MakeRopeTable for as many positions as a sequence
  // may have.
  static absl::StatusOr<std::unique_ptr<DecoderModel>> Load(const Checkpoint& checkpoint,
                                                            const ModelConfig& config,
                                                            std::span<const float> rope_table,
                                                            Backend* backend,
                                                            const LoadProgress& progress);

  // Runs all layers over the batch's rows: writes keys and values of its tokens to `cache` and
  // leaves the final norm's output in activations->hidden. `previous_tokens` as in EmbeddingParams,
  // may be null.
  absl::Status Forward(const BatchInput& batch, const int32_t* previous_tokens,
                       const KvCache& cache, Activations* activations) const;

  // activations->logits[i, :] = head applied to row row_indices[i] (backend memory; null: row i) of
  // activations->hidden.
  absl::Status ComputeLogits(const int32_t* row_indices, int32_t num_rows,
                             Activations* activations) const;

  // Puts another weight of the same shape in place of one of a layer's: 0 qkv, 1 output, 2 gate_up,
  // 3 down. Not while a pass is queued.
  void ReplaceLinear(int32_t layer, int32_t part, std::unique_ptr<LinearWeight> weight) {
    LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
    std::unique_ptr<LinearWeight>* const linears[] = {&weights.qkv, &weights.output,
                                                      &weights.gate_up, &weights.down};
    *linears[part] = std::move(weight);
  }

  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }

 private:
  DecoderModel(const ModelConfig& config, ModelWeights weights, DeviceBuffer rope_table,
               Backend* backend);

  absl::Status DecoderLayer(int32_t layer, const BatchInput& batch, const KvCache& cache,
                            Activations* activations) const;
  absl::Status Attention(int32_t layer, const BatchInput& batch, const KvCache& cache,
                         Activations* activations) const;
  absl::Status Mlp(int32_t layer, int32_t num_rows, Activations* activations) const;
  absl::Status Norm(int32_t num_rows, const NormWeight& weight, bool add_to_residual,
                    Activations* activations) const;
  absl::Status Linear(int32_t num_rows, const LinearWeight& weight, const DeviceBuffer& x,
                      const DeviceBuffer& y) const;

  const ModelConfig config_;
  ModelWeights weights_;
  const DeviceBuffer rope_table_;
  Backend* const backend_;
  const DType activation_dtype_;
};

}  // namespace flashquant
