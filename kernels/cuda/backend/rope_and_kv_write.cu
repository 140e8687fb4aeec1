// Rotary position embedding and the write of keys and values to their KV slots. One block a token;
// a thread takes pairs (i, i + D / 2), rotates them in FP32 and stores the key's where it belongs.
#include <cuda_bf16.h>

#include "kernels/cuda/backend/op_launchers.h"
#include "kernels/cuda/backend/paged_attention/kv_type.cuh"
#include "kernels/cuda/backend/rotary.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/kv_row.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 256;

// The slot's row of `cache` for one head, null for a padding token.
template <typename Element>
__device__ Element* CacheRow(void* cache, const PagedKvGeometry& kv, int64_t slot, int head) {
  if (slot < 0) return nullptr;
  return static_cast<Element*>(cache) +
         KvRowOffset(kv, slot / kv.block_tokens, head, static_cast<int>(slot % kv.block_tokens));
}

template <typename Kv>
__global__ void RopeAndKvWriteKernel(RopeAndKvWriteParams params) {
  using Element = typename Kv::Element;
  BeginDependent();
  const int64_t token = blockIdx.x;
  const int d = params.head_dim;
  const int half = d / 2;
  const int heads = params.num_heads;
  const int kv_heads = params.num_kv_heads;
  __nv_bfloat16* row = static_cast<__nv_bfloat16*>(params.qkv) + token * (heads + 2 * kv_heads) * d;
  const float* cos_sin = params.cos_sin + static_cast<int64_t>(params.positions[token]) * d;
  const int64_t slot = params.slots[token];
  const float k_inverse = Kv::kScaled ? 1.0f / params.kv_scales.k : 1.0f;
  const float v_inverse = Kv::kScaled ? 1.0f / params.kv_scales.v : 1.0f;

  for (int i = threadIdx.x; i < (heads + kv_heads) * half; i += kThreads) {
    const int head = i / half;
    const int pair = i % half;
    __nv_bfloat16* x = row + head * d + pair;
    const float cosine = cos_sin[pair];
    const float sine = cos_sin[half + pair];
    const auto [low, high] = Rotate(x[0], x[half], cosine, sine);
    x[0] = low;
    x[half] = high;
    if (head < heads) continue;
    if (Element* k = CacheRow<Element>(params.k_cache, params.kv, slot, head - heads)) {
      k[pair] = Kv::FromBf16(low, k_inverse);
      k[half + pair] = Kv::FromBf16(high, k_inverse);
    }
  }
  if (slot < 0) return;
  const __nv_bfloat16* v = row + (heads + kv_heads) * d;
  for (int i = threadIdx.x; i < kv_heads * d; i += kThreads) {
    Element* row_of_head = CacheRow<Element>(params.v_cache, params.kv, slot, i / d);
    row_of_head[i % d] = Kv::FromBf16(v[i], v_inverse);
  }
}

}  // namespace

cudaError_t LaunchRopeAndKvWrite(const RopeAndKvWriteParams& params, bool fp8_cache,
                                 cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  const auto kernel = fp8_cache ? RopeAndKvWriteKernel<Fp8Kv> : RopeAndKvWriteKernel<Bf16Kv>;
  return LaunchDependent(kernel, dim3(static_cast<unsigned>(params.num_tokens)), kThreads, 0,
                         stream, params);
}

}  // namespace flashquant::cuda
