// Rotary position embedding and the write of keys and values to their KV slots. Short loops over
// D / 2 that the compiler vectorises; no target-specific code.
#include <algorithm>

#include "kernels/base/bfloat16.h"
#include "kernels/base/float8.h"
#include "kernels/cpu/cpu_kernels.h"

namespace flashquant {
namespace {

void Rotate(const float* cos_sin, int64_t half, float* x) {
  const float* cosines = cos_sin;
  const float* sines = cos_sin + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i];
    const float b = x[i + half];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + half] = b * cosines[i] + a * sines[i];
  }
}

// One head's key or value to element `to` of a cache. `scale` is FP8's.
void StoreHead(const float* from, int64_t head_dim, DType kv_dtype, float scale, void* cache,
               int64_t to) {
  if (kv_dtype == DType::kF32) {
    std::copy_n(from, head_dim, static_cast<float*>(cache) + to);
  } else if (kv_dtype == DType::kBF16) {
    std::transform(from, from + head_dim, static_cast<BFloat16*>(cache) + to, ToBFloat16);
  } else {
    const float inverse = 1.0f / scale;
    std::transform(from, from + head_dim, static_cast<Float8E4M3*>(cache) + to,
                   [&](float x) { return ToFloat8E4M3(x * inverse); });
  }
}

void RopeAndKvWriteToken(const RopeAndKvWriteParams& params, DType kv_dtype, int64_t token) {
  const int64_t d = params.head_dim;
  const int64_t heads = params.num_heads;
  const int64_t kv_heads = params.num_kv_heads;
  float* q = static_cast<float*>(params.qkv) + token * (heads + 2 * kv_heads) * d;
  float* k = q + heads * d;
  const float* v = k + kv_heads * d;
  const float* cos_sin = params.cos_sin + params.positions[token] * d;
  for (int64_t head = 0; head < heads + kv_heads; ++head) Rotate(cos_sin, d / 2, q + head * d);

  const int64_t slot = params.slots[token];
  if (slot < 0) return;
  const int64_t block = slot / params.kv.block_tokens;
  const auto offset = static_cast<int32_t>(slot % params.kv.block_tokens);
  for (int32_t head = 0; head < params.num_kv_heads; ++head) {
    const int64_t to = params.kv.RowOffset(block, head, offset);
    StoreHead(k + head * d, d, kv_dtype, params.kv_scales.k, params.k_cache, to);
    StoreHead(v + head * d, d, kv_dtype, params.kv_scales.v, params.v_cache, to);
  }
}

}  // namespace

void RopeAndKvWriteCpu(const RopeAndKvWriteParams& params, DType kv_dtype, ThreadPool& pool) {
  const int64_t width =
      static_cast<int64_t>(params.num_heads + 2 * params.num_kv_heads) * params.head_dim;
  ForRows(pool, params.num_tokens, width,
          [&](int64_t token) { RopeAndKvWriteToken(params, kv_dtype, token); });
}

}  // namespace flashquant
