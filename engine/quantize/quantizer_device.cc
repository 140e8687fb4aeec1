#include "engine/quantize/quantizer_device.h"

#include "engine/quantize/cpu_quantizer_ops.h"
#include "kernels/backend_factory.h"
#include "kernels/base/status_macros.h"
#include "kernels/quantizer_ops_factory.h"

namespace flashquant {

absl::StatusOr<QuantizerDevice> OpenQuantizerDevice(const std::string& kind, int num_threads) {
  QuantizerDevice device;
  FQ_ASSIGN_OR_RETURN(device.backend, CreateBackend({.kind = kind, .num_threads = num_threads}));
  FQ_ASSIGN_OR_RETURN(device.ops, CreateDeviceQuantizerOps(device.backend.get()));
  if (device.ops == nullptr) device.ops = std::make_unique<CpuQuantizerOps>(num_threads);
  return device;
}

}  // namespace flashquant
