#include "kernels/backend_factory.h"

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#ifdef FQ_HAVE_CUDA
#include "kernels/cuda/backend/cuda_backend.h"
#endif

namespace flashquant {
namespace {

constexpr int32_t kMaxThreads = 1024;
constexpr int32_t kMaxRowMultiple = 256;

#ifdef FQ_HAVE_CUDA
constexpr int32_t kCudaRowMultiple = 8;  // columns of a tensor-core tile

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const BackendOptions& options) {
  const int32_t row_multiple = options.row_multiple == 0 ? kCudaRowMultiple : options.row_multiple;
  FQ_ASSIGN_OR_RETURN(const std::optional<DType> kv_dtype,
                      ParseKvCacheDType(options.kv_cache_dtype));
  FQ_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend,
                      cuda::CudaBackend::Create(row_multiple, kv_dtype.value_or(DType::kBF16),
                                                options.kernel_plans));
  return backend;
}
#else
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const BackendOptions& /*options*/) {
  return UnavailableError(
      "backend 'cuda': this program was built without CUDA (README, \"Use\": the preset cuda)");
}
#endif

}  // namespace

absl::StatusOr<std::optional<DType>> ParseKvCacheDType(std::string_view name) {
  if (name == "auto") return std::nullopt;
  if (name == "bf16") return DType::kBF16;
  if (name == "fp8") return DType::kF8E4M3;
  return InvalidArgumentError("KV cache dtype '{}'; auto, bf16 or fp8", name);
}

std::string_view KvCacheDTypeName(DType kv_dtype) {
  return kv_dtype == DType::kF8E4M3 ? "fp8" : "auto";
}

absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const BackendOptions& options) {
  if (options.kind != "auto" && options.kind != "cpu" && options.kind != "cuda") {
    return InvalidArgumentError("backend '{}'; auto, cpu or cuda", options.kind);
  }
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    return InvalidArgumentError("threads: {}; 0 (all cores) to {}", options.num_threads,
                                kMaxThreads);
  }
  if (options.row_multiple < 0 || options.row_multiple > kMaxRowMultiple) {
    return InvalidArgumentError("row multiple: {}; 0 (the backend's own) to {}",
                                options.row_multiple, kMaxRowMultiple);
  }
  FQ_ASSIGN_OR_RETURN(const std::optional<DType> kv_dtype,
                      ParseKvCacheDType(options.kv_cache_dtype));
  if (options.kind != "cpu") {
    absl::StatusOr<std::unique_ptr<Backend>> backend = CreateCudaBackend(options);
    if (options.kind == "cuda" || !absl::IsUnavailable(backend.status())) return backend;
  }
  const int32_t threads = options.num_threads == 0 ? UsableCores() : options.num_threads;
  const int32_t row_multiple = options.row_multiple == 0 ? 1 : options.row_multiple;
  return std::make_unique<CpuBackend>(threads, row_multiple, kv_dtype.value_or(DType::kF32));
}

}  // namespace flashquant
