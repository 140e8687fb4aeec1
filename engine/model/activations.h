// Activations: the scratch tensors of a forward pass, sized once for the largest step.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/model/model_config.h"
#include "kernels/backend.h"

namespace flashquant {

// Row counts as allocated; element type is the backend's activation type unless marked.
struct Activations {
  static absl::StatusOr<std::unique_ptr<Activations>> Create(Backend* backend,
                                                             const ModelConfig& config,
                                                             int32_t max_rows,
                                                             int32_t max_logit_rows);

  int32_t max_rows = 0;
  int32_t max_logit_rows = 0;
  DeviceBuffer residual;  // [rows, hidden], the residual stream
  DeviceBuffer
      hidden;  // [rows, hidden], input or output of a block; at the end the final norm's output
  DeviceBuffer qkv;           // [rows, (H + 2 H_kv) * D]
  DeviceBuffer attention;     // [rows, H * D]
  DeviceBuffer gate_up;       // [rows, 2 * intermediate]
  DeviceBuffer intermediate;  // [rows, intermediate]
  DeviceBuffer logits_input;  // [logit rows, hidden]
  DeviceBuffer logits;        // [logit rows, V] FP32
};

}  // namespace flashquant
