#include "kernels/quantizer_ops_factory.h"

#include "kernels/base/status_macros.h"
#ifdef FQ_HAVE_CUDA
#include "kernels/cuda/backend/cuda_backend.h"
#include "kernels/cuda/quantize/cuda_quantizer_ops.h"
#endif

namespace flashquant {

absl::StatusOr<std::unique_ptr<QuantizerOps>> CreateDeviceQuantizerOps(Backend* backend) {
  const std::string name = backend->info().name;
  if (name == "cpu") return std::unique_ptr<QuantizerOps>();
#ifdef FQ_HAVE_CUDA
  if (name == "cuda") {
    const auto* cuda_backend = static_cast<const cuda::CudaBackend*>(backend);
    FQ_ASSIGN_OR_RETURN(std::unique_ptr<QuantizerOps> ops,
                        cuda::CudaQuantizerOps::Create(backend, cuda_backend->stream()));
    return ops;
  }
#endif
  return UnimplementedError("backend '{}' does not quantize", name);
}

}  // namespace flashquant
