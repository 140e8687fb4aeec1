// Ops that copy rows: embedding lookup, GatherRows, the bias under a product. One block a row.
#include "kernels/cuda/backend/op_launchers.h"
#include "kernels/cuda/primitives/bf16_rows.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 256;

// Copies `width` BF16 elements; `from` null writes zeros. Vectors when kWidth is 8.
template <int kWidth>
__device__ void CopyRow(const __nv_bfloat16* from, int64_t width, __nv_bfloat16* to) {
  for (int64_t i = threadIdx.x * kWidth; i < width; i += kThreads * kWidth) {
    if constexpr (kWidth == kVectorElements) {
      const uint4 zeros = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(to + i) =
          from == nullptr ? zeros : *reinterpret_cast<const uint4*>(from + i);
    } else {
      to[i] = from == nullptr ? __float2bfloat16_rn(0.0f) : from[i];
    }
  }
}

template <int kWidth>
__global__ void EmbeddingKernel(EmbeddingParams params, const __nv_bfloat16* table,
                                int64_t vocab_size, int64_t hidden) {
  BeginDependent();
  const int64_t token = blockIdx.x;
  const int previous = params.previous_rows == nullptr ? -1 : params.previous_rows[token];
  const int64_t id = previous >= 0 ? params.previous_tokens[previous] : params.token_ids[token];
  const bool known = id >= 0 && id < vocab_size;
  CopyRow<kWidth>(known ? table + id * hidden : nullptr, hidden,
                  static_cast<__nv_bfloat16*>(params.out) + token * hidden);
}

template <int kWidth>
__global__ void GatherRowsKernel(const int32_t* row_indices, const __nv_bfloat16* in,
                                 int64_t hidden, __nv_bfloat16* out) {
  BeginDependent();
  const int64_t row = blockIdx.x;
  CopyRow<kWidth>(in + row_indices[row] * hidden, hidden, out + row * hidden);
}

template <typename T>
__global__ void FillBiasKernel(const __nv_bfloat16* bias, int64_t n, int64_t y_stride, T* y) {
  BeginDependent();
  T* row = y + static_cast<int64_t>(blockIdx.x) * y_stride;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) row[i] = static_cast<T>(bias[i]);
}

// A block takes kThreads * kPerThread elements of a row.
constexpr int kPerThread = 8;

// Grid: (parts of a row, rows). T: what is written, BF16 over `from` or FP32.
template <typename T>
__global__ void AddBiasKernel(const __nv_bfloat16* from, const __nv_bfloat16* bias, int64_t n,
                              T* to) {
  BeginDependent();
  const int64_t row = static_cast<int64_t>(blockIdx.y) * n;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads * kPerThread + threadIdx.x;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t i = begin + j * kThreads;
    if (i >= n) break;
    float value = __bfloat162float(from[row + i]);
    if (bias != nullptr) value += __bfloat162float(bias[i]);
    to[row + i] = static_cast<T>(value);
  }
}

template <typename T>
cudaError_t LaunchAddBiasTo(const void* from, const void* bias, int64_t num_rows, int64_t n, T* to,
                            cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  constexpr int64_t kPart = kThreads * kPerThread;
  const dim3 grid(static_cast<unsigned>((n + kPart - 1) / kPart), static_cast<unsigned>(num_rows));
  return LaunchDependent(AddBiasKernel<T>, grid, kThreads, 0, stream,
                         static_cast<const __nv_bfloat16*>(from),
                         static_cast<const __nv_bfloat16*>(bias), n, to);
}

}  // namespace

cudaError_t LaunchAddBias(const void* bias, int64_t num_rows, int64_t n, void* y,
                          cudaStream_t stream) {
  return LaunchAddBiasTo(y, bias, num_rows, n, static_cast<__nv_bfloat16*>(y), stream);
}

cudaError_t LaunchWiden(const void* from, const void* bias, int64_t num_rows, int64_t n, float* to,
                        cudaStream_t stream) {
  return LaunchAddBiasTo(from, bias, num_rows, n, to, stream);
}

cudaError_t HasDeviceCode() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, GatherRowsKernel<1>);
}

cudaError_t LaunchEmbedding(const EmbeddingParams& params, const void* table, int64_t vocab_size,
                            int64_t hidden, cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  const bool vectors = IsVectorAligned(table, hidden) && IsVectorAligned(params.out, hidden);
  const auto kernel = vectors ? EmbeddingKernel<kVectorElements> : EmbeddingKernel<1>;
  return LaunchDependent(kernel, dim3(static_cast<unsigned>(params.num_tokens)), kThreads, 0,
                         stream, params, static_cast<const __nv_bfloat16*>(table), vocab_size,
                         hidden);
}

cudaError_t LaunchGatherRows(const GatherRowsParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const bool vectors =
      IsVectorAligned(params.in, params.hidden) && IsVectorAligned(params.out, params.hidden);
  const auto kernel = vectors ? GatherRowsKernel<kVectorElements> : GatherRowsKernel<1>;
  return LaunchDependent(kernel, dim3(static_cast<unsigned>(params.num_rows)), kThreads, 0, stream,
                         params.row_indices, static_cast<const __nv_bfloat16*>(params.in),
                         params.hidden, static_cast<__nv_bfloat16*>(params.out));
}

cudaError_t LaunchFillBias(const void* bias, int64_t num_rows, int64_t n, int64_t y_stride,
                           bool y_is_float, void* y, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(num_rows));
  const auto* from = static_cast<const __nv_bfloat16*>(bias);
  if (y_is_float) {
    return LaunchDependent(FillBiasKernel<float>, grid, kThreads, 0, stream, from, n, y_stride,
                           static_cast<float*>(y));
  }
  return LaunchDependent(FillBiasKernel<__nv_bfloat16>, grid, kThreads, 0, stream, from, n,
                         y_stride, static_cast<__nv_bfloat16*>(y));
}

}  // namespace flashquant::cuda
