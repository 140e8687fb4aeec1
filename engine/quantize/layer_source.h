// LayerSource: one decoder layer of a checkpoint, presented as a whole model of one layer, so that
// the ordinary loader makes it. Weights can be replaced.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/checkpoint/tensor_source.h"
#include "engine/model/model_config.h"

namespace flashquant {

// What stands in place of a layer's weight: row-major, F32 or BF16.
struct ReplacedWeight {
  DType dtype = DType::kF32;
  std::vector<uint8_t> bytes;
};

class LayerSource final : public TensorSource {
 public:
  // Layer `layer` of `model` under the name of layer 0, the final norm and learned positions as
  // they are, and an embedding table of one row of zeros. `model` and `replaced` outlive the
  // object; `replaced` holds weights by the layer's name in the model, without ".weight".
  LayerSource(const TensorSource& model, const ModelConfig& config, int32_t layer,
              const std::map<std::string, ReplacedWeight>& replaced);

  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  absl::Status ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                        void* out) const override;

 private:
  const TensorSource& model_;
  const std::map<std::string, ReplacedWeight>& replaced_;
  const std::string prefix_;       // "model.layers.‹layer›."
  const std::string first_layer_;  // "model.layers.0."
  const std::string embedding_;
  std::vector<TensorInfo> tensors_;
};

}  // namespace flashquant
