// Calibration: what the quantizer knows of the inputs that a model's linear layers get.
//
// An interface, so that the quantizer does not depend on the model's code; model_calibration.h runs
// a text through the engine's own forward pass.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/quantizer_ops.h"

namespace flashquant {

class Calibration {
 public:
  virtual ~Calibration() = default;

  // Names of the linear layers ("model.layers.0.self_attn.q_proj") whose inputs can be had, in the
  // order of the forward pass.
  virtual const std::vector<std::string>& layers() const = 0;
  // The inputs of a layer, given what SetQuantized put in place of the layers before it. To be
  // called in the order of layers(), all names of one block or not at all; `ops` holds these inputs
  // until the next call. Layers that share their input share its id.
  struct Inputs {
    QuantizerOps* ops = nullptr;
    int64_t id = 0;
  };
  virtual absl::StatusOr<Inputs> InputsOf(const std::string& layer) = 0;
  // From now on the forward pass uses these weights [n, k] for that layer.
  virtual absl::Status SetQuantized(const std::string& layer, std::vector<float> weights) = 0;

  // Forgets what SetQuantized said and begins again with the first layer.
  virtual absl::Status Restart() = 0;

  // For the report.
  virtual int64_t num_tokens() const = 0;
  virtual std::string description() const = 0;
  // Differs for calibrations that may give other inputs.
  virtual std::string fingerprint() const { return description(); }
};

}  // namespace flashquant
