// ModelWeights: every weight of a decoder in the backend's packed form.
//
// q, k, v and gate, up are joined along N into one linear each; the checkpoint keeps them apart.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/model/load_times.h"
#include "engine/model/model_config.h"
#include "kernels/backend.h"

namespace flashquant {

// FP32; the bias is empty for RMSNorm.
struct NormWeight {
  DeviceBuffer weight;
  DeviceBuffer bias;
};

struct LayerWeights {
  NormWeight input_norm;           // [hidden]
  NormWeight post_attention_norm;  // [hidden]; of OPT: before the MLP
  DeviceBuffer q_norm;             // [D] FP32 for a model with head_norms, else empty
  DeviceBuffer k_norm;
  KvScales kv_scales;  // of an FP8 KV cache: the checkpoint's, else 1
  std::unique_ptr<LinearWeight> qkv;
  std::unique_ptr<LinearWeight> output;
  std::unique_ptr<LinearWeight> gate_up;  // of OPT: fc1
  std::unique_ptr<LinearWeight> down;
};

struct ModelWeights {
  std::unique_ptr<LinearWeight> embedding;    // N = vocabulary, K = hidden, dense
  std::unique_ptr<LinearWeight> own_lm_head;  // null when the head is the embedding table
  std::vector<LayerWeights> layers;
  NormWeight final_norm;   // [hidden]
  DeviceBuffer positions;  // [max_position, hidden] FP32, learned; empty with rotary ones
  LoadSeconds load_seconds;

  const LinearWeight* lm_head() const {
    return own_lm_head != nullptr ? own_lm_head.get() : embedding.get();
  }
  // Bytes one decode step reads: all linears and the head, the embedding's rows apart.
  int64_t StepBytes() const;
};

// Told after each layer: layers done, layers in all.
using LoadProgress = std::function<void(int32_t, int32_t)>;

// Reads, checks and packs one layer after the other, the next few linear layers read ahead.
// Errors of the checkpoint with the layer's name (DATA_LOSS, missing tensor, wrong shape), of the
// backend as they are.
absl::StatusOr<ModelWeights> LoadModelWeights(const Checkpoint& checkpoint,
                                              const ModelConfig& config, Backend* backend,
                                              const LoadProgress& progress);

}  // namespace flashquant
