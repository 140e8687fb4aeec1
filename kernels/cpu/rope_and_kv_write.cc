// Rotary position embedding and the write of keys and values to their KV slots. Short loops over
// D / 2 that the compiler vectorises; no target-specific code.
#include <algorithm>

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

void RopeAndKvWriteToken(const RopeAndKvWriteParams& params, int64_t token) {
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
    std::copy_n(k + head * d, d, static_cast<float*>(params.k_cache) + to);
    std::copy_n(v + head * d, d, static_cast<float*>(params.v_cache) + to);
  }
}

}  // namespace

void RopeAndKvWriteCpu(const RopeAndKvWriteParams& params, ThreadPool& pool) {
  const int64_t width =
      static_cast<int64_t>(params.num_heads + 2 * params.num_kv_heads) * params.head_dim;
  ForRows(pool, params.num_tokens, width,
          [&](int64_t token) { RopeAndKvWriteToken(params, token); });
}

}  // namespace flashquant
