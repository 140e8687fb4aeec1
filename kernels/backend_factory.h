// Makes the backend that a user asked for; the only place that knows which backends were built in.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/base/tuned_plan.h"

namespace flashquant {

struct BackendOptions {
  std::string_view kind = "auto";            // auto, cpu or cuda
  int32_t num_threads = 0;                   // CPU workers; 0 = one per core this process may use
  int32_t row_multiple = 0;                  // 0 = the backend's own
  std::string_view kv_cache_dtype = "auto";  // auto, bf16 or fp8
  std::vector<TunedPlan> kernel_plans{};     // of the fused kernel, measured on this device
};

// The element type that kv_cache_dtype names; nullopt for "auto", the backend's own: FP32 on the
// CPU, BF16 on CUDA. INVALID_ARGUMENT for another name.
absl::StatusOr<std::optional<DType>> ParseKvCacheDType(std::string_view name);
// The name that makes another backend keep its keys and values as one of this type does, if FP8.
std::string_view KvCacheDTypeName(DType kv_dtype);

// "auto" is CUDA where it is built in and there is a device that it can use, else the CPU.
// INVALID_ARGUMENT for an unknown kind or type of KV cache, UNAVAILABLE when the device (or its
// backend in this build) is not there.
absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const BackendOptions& options);

}  // namespace flashquant
