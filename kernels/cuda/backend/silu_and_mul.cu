// SwiGLU's pointwise part: silu(gate) * up, in FP32 between BF16 loads and stores.
#include <algorithm>

#include "kernels/cuda/backend/op_launchers.h"
#include "kernels/cuda/primitives/bf16_rows.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 256;

template <int kWidth>
__global__ void SiluAndMulKernel(const __nv_bfloat16* gate_up, int64_t intermediate,
                                 __nv_bfloat16* out) {
  BeginDependent();
  const int64_t row = blockIdx.y;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (i >= intermediate) return;
  const __nv_bfloat16* gate_row = gate_up + row * 2 * intermediate;
  float gate[kWidth];
  float up[kWidth];
  LoadBf16<kWidth>(gate_row + i, gate);
  LoadBf16<kWidth>(gate_row + intermediate + i, up);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    // Past 88 exp leaves float's range, where silu is 0 for any purpose; NaN comes through the
    // product with gate.
    gate[j] = gate[j] / (1.0f + expf(fminf(-gate[j], 88.0f))) * up[j];
  }
  StoreBf16<kWidth>(gate, out + row * intermediate + i);
}

}  // namespace

cudaError_t LaunchSiluAndMul(const SiluAndMulParams& params, cudaStream_t stream) {
  const bool vectors = IsVectorAligned(params.gate_up, params.intermediate) &&
                       IsVectorAligned(params.out, params.intermediate);
  const int64_t per_block = int64_t{kThreads} * (vectors ? kVectorElements : 1);
  const auto blocks = static_cast<unsigned>((params.intermediate + per_block - 1) / per_block);
  const auto kernel = vectors ? SiluAndMulKernel<kVectorElements> : SiluAndMulKernel<1>;
  constexpr int kMaxRows = 65535;  // of a grid
  for (int first = 0; first < params.num_rows; first += kMaxRows) {
    const auto rows = static_cast<unsigned>(std::min(kMaxRows, params.num_rows - first));
    const cudaError_t error = LaunchDependent(
        kernel, dim3(blocks, rows), kThreads, 0, stream,
        static_cast<const __nv_bfloat16*>(params.gate_up) +
            int64_t{first} * 2 * params.intermediate,
        params.intermediate,
        static_cast<__nv_bfloat16*>(params.out) + int64_t{first} * params.intermediate);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace flashquant::cuda
