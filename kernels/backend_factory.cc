#include "kernels/backend_factory.h"

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"

namespace flashquant {
namespace {

constexpr int32_t kMaxThreads = 1024;
constexpr int32_t kMaxRowMultiple = 256;

}  // namespace

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
  if (options.kind == "cuda") {
    return UnavailableError("backend 'cuda' is not in this build (FQ_ENABLE_CUDA)");
  }
  const int32_t threads = options.num_threads == 0 ? UsableCores() : options.num_threads;
  const int32_t row_multiple = options.row_multiple == 0 ? 1 : options.row_multiple;
  return std::make_unique<CpuBackend>(threads, row_multiple);
}

}  // namespace flashquant
