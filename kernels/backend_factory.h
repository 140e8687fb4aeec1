// Makes the backend that a user asked for; the only place that knows which backends were built in.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/base/tuned_plan.h"

namespace flashquant {

struct BackendOptions {
  std::string_view kind = "auto";         // auto, cpu or cuda
  int32_t num_threads = 0;                // CPU workers; 0 = one per core this process may use
  int32_t row_multiple = 0;               // 0 = the backend's own
  std::vector<TunedPlan> kernel_plans{};  // of the fused kernel, measured on this device
};

// "auto" is CUDA where it is built in and there is a device that it can use, else the CPU.
// INVALID_ARGUMENT for an unknown kind, UNAVAILABLE when the device (or its backend in this build)
// is not there.
absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const BackendOptions& options);

}  // namespace flashquant
