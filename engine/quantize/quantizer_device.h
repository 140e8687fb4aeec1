// QuantizerDevice: where quantizing runs, a backend for the calibration's forward passes and the
// QuantizerOps that read its activations.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/quantizer_ops.h"

namespace flashquant {

struct QuantizerDevice {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<QuantizerOps> ops;  // of the backend: destroyed before it
};

// kind: auto, cpu or cuda. Errors: those of CreateBackend and CreateDeviceQuantizerOps.
absl::StatusOr<QuantizerDevice> OpenQuantizerDevice(const std::string& kind, int num_threads);

}  // namespace flashquant
