// RMSNorm with the residual added before it. One block a row; rows of up to 16384 elements stay in
// registers between the sum and the scaling.
#include "kernels/cuda/backend/op_launchers.h"
#include "kernels/cuda/primitives/bf16_rows.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kMostHeld = 4;  // pieces of a row that a thread keeps in registers

// kPieces: of kWidth elements, a thread has of a row; 0: as many as it takes, read again from
// memory for the scaling.
template <int kWidth, int kPieces>
__global__ void __launch_bounds__(kThreads)
    RmsNormKernel(const __nv_bfloat16* x, __nv_bfloat16* residual, const float* weight,
                  float epsilon, int hidden, __nv_bfloat16* out) {
  __shared__ float scratch[32];
  constexpr int kHeld = kPieces == 0 ? 1 : kPieces;
  const int first = static_cast<int>(threadIdx.x) * kWidth;
  float scale[kHeld][kWidth];  // no result of the kernel before
  if constexpr (kPieces > 0) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int i = first + piece * kThreads * kWidth;
      if (i >= hidden) break;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) scale[piece][j] = weight[i + j];
    }
  }
  BeginDependent();
  const int64_t row_begin = static_cast<int64_t>(blockIdx.x) * hidden;
  const __nv_bfloat16* source = x + row_begin;
  float held[kHeld][kWidth];
  float sum = 0.0f;
  const auto load = [&](int i, float(&value)[kWidth]) {
    LoadBf16<kWidth>(source + i, value);
    if (residual != nullptr) {
      float old[kWidth];
      LoadBf16<kWidth>(residual + row_begin + i, old);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        value[j] = __bfloat162float(__float2bfloat16_rn(old[j] + value[j]));
      }
      StoreBf16<kWidth>(value, residual + row_begin + i);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += value[j] * value[j];
  };
  const auto store = [&](int i, float(&value)[kWidth], const float* scales, float factor) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) value[j] *= factor * scales[j];
    StoreBf16<kWidth>(value, out + row_begin + i);
  };
  if constexpr (kPieces == 0) {
    for (int i = first; i < hidden; i += kThreads * kWidth) load(i, held[0]);
  } else {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int i = first + piece * kThreads * kWidth;
      if (i < hidden) load(i, held[piece]);
    }
  }
  const float mean = BlockSum(sum, scratch) / static_cast<float>(hidden);
  const float factor = rsqrtf(mean + epsilon);
  if constexpr (kPieces == 0) {
    // Each thread reads back what it wrote itself, so `out` may be `x`.
    if (residual != nullptr) source = residual + row_begin;
    for (int i = first; i < hidden; i += kThreads * kWidth) {
      LoadBf16<kWidth>(source + i, held[0]);
      store(i, held[0], weight + i, factor);
    }
  } else {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int i = first + piece * kThreads * kWidth;
      if (i < hidden) store(i, held[piece], scale[piece], factor);
    }
  }
}

}  // namespace

cudaError_t LaunchRmsNorm(const RmsNormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const bool vectors =
      IsVectorAligned(params.x, params.hidden) && IsVectorAligned(params.out, params.hidden) &&
      (params.residual == nullptr || IsVectorAligned(params.residual, params.hidden));
  constexpr int kSpan = kThreads * kVectorElements;  // one piece of every thread
  const auto kernel = !vectors                 ? RmsNormKernel<1, 0>
                      : params.hidden <= kSpan ? RmsNormKernel<kVectorElements, 1>
                      : params.hidden <= kMostHeld * kSpan
                          ? RmsNormKernel<kVectorElements, kMostHeld>
                          : RmsNormKernel<kVectorElements, 0>;
  return LaunchDependent(kernel, dim3(static_cast<unsigned>(params.num_rows)), kThreads, 0, stream,
                         static_cast<const __nv_bfloat16*>(params.x),
                         static_cast<__nv_bfloat16*>(params.residual),
                         static_cast<const float*>(params.weight), params.epsilon, params.hidden,
                         static_cast<__nv_bfloat16*>(params.out));
}

}  // namespace flashquant::cuda
