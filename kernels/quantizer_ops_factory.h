// Makes the QuantizerOps that go with a backend.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/quantizer_ops.h"

namespace flashquant {

// For a backend of backend_factory.h, which outlives the ops; null for the CPU backend, whose ops
// are engine/quantize/cpu_quantizer_ops.h. RESOURCE_EXHAUSTED when the device has no memory left.
absl::StatusOr<std::unique_ptr<QuantizerOps>> CreateDeviceQuantizerOps(Backend* backend);

}  // namespace flashquant
