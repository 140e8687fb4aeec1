// Causal grouped-query attention over the paged KV cache, for prefill and decode rows alike.
//
// A task is one query row and one KV head with the query heads that share it. It walks the row's
// keys in tiles of 64, cut at multiples of 64 from position 0, with a running softmax (the online
// softmax of Milakov and Gimelshein, as in FlashAttention). So the order of every sum is given by
// key positions alone: neither chunked prefill nor the batch can change a row's result.
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/paged_attention.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include <algorithm>
#include <cmath>
#include <limits>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/cpu/cpu_kernels.h"

#ifndef FLASHQUANT_KERNELS_CPU_PAGED_ATTENTION_CC_ONCE_
#define FLASHQUANT_KERNELS_CPU_PAGED_ATTENTION_CC_ONCE_
namespace flashquant {

// One query row and one KV head.
struct AttentionTask {
  const PagedAttentionParams* params = nullptr;
  const int32_t* block_ids = nullptr;  // the sequence's blocks
  int64_t first_key = 0;
  int64_t end_key = 0;  // the row's own position + 1
  int32_t kv_head = 0;
  const float* q = nullptr;  // [group][head_dim]
  float* out = nullptr;      // [group][head_dim]
  float* scratch = nullptr;
};

}  // namespace flashquant
#endif  // FLASHQUANT_KERNELS_CPU_PAGED_ATTENTION_CC_ONCE_

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;

HWY_INLINE float Dot(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, int64_t size) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d);
  auto sum1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * lanes <= size; i += 2 * lanes) {
    sum0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum0);
    sum1 = hn::MulAdd(hn::LoadU(d, a + i + lanes), hn::LoadU(d, b + i + lanes), sum1);
  }
  for (; i + lanes <= size; i += lanes) {
    sum0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum0);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  for (; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

// out = out * factor + sum over keys of weight * value.
HWY_INLINE void AddValues(const float* const* values, const float* weights, int64_t num_keys,
                          float factor, int64_t head_dim, float* out) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + 2 * lanes <= head_dim; i += 2 * lanes) {
    auto sum0 = hn::Mul(hn::LoadU(d, out + i), hn::Set(d, factor));
    auto sum1 = hn::Mul(hn::LoadU(d, out + i + lanes), hn::Set(d, factor));
    for (int64_t key = 0; key < num_keys; ++key) {
      const auto weight = hn::Set(d, weights[key]);
      sum0 = hn::MulAdd(weight, hn::LoadU(d, values[key] + i), sum0);
      sum1 = hn::MulAdd(weight, hn::LoadU(d, values[key] + i + lanes), sum1);
    }
    hn::StoreU(sum0, d, out + i);
    hn::StoreU(sum1, d, out + i + lanes);
  }
  for (; i < head_dim; ++i) {
    float sum = out[i] * factor;
    for (int64_t key = 0; key < num_keys; ++key) sum += weights[key] * values[key][i];
    out[i] = sum;
  }
}

// Running softmax of one query head.
struct SoftmaxState {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0.0f;
};

// Replaces a tile's scores by their weights exp(score - max) and returns the factor for all that
// was summed before. A score that is not finite makes `sum` NaN, and with it the row.
HWY_INLINE float UpdateSoftmax(float* scores, int64_t num_keys, SoftmaxState& state) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  float max = state.max;
  float poison = 0.0f;
  for (int64_t key = 0; key < num_keys; ++key) {
    max = std::max(max, scores[key]);
    poison += scores[key] - scores[key];
  }
  for (int64_t key = num_keys; key < kAttentionTileKeys; ++key) scores[key] = max;
  for (int64_t key = 0; key < num_keys; key += lanes) {
    const auto score = hn::LoadU(d, scores + key);
    hn::StoreU(hn::Exp(d, hn::Sub(score, hn::Set(d, max))), d, scores + key);
  }
  const float factor = state.sum == 0.0f ? 0.0f : std::exp(state.max - max);
  float sum = 0.0f;
  for (int64_t key = 0; key < num_keys; ++key) sum += scores[key];
  state.sum = state.sum * factor + sum + poison;
  state.max = max;
  return factor;
}

void AttendRow(const AttentionTask& task) {
  const PagedAttentionParams& params = *task.params;
  const int64_t head_dim = params.head_dim;
  const int64_t group = params.num_heads / params.num_kv_heads;
  const int64_t block_tokens = params.kv.block_tokens;
  const auto* k_cache = static_cast<const float*>(params.k_cache);
  const auto* v_cache = static_cast<const float*>(params.v_cache);
  float* scores = task.scratch;  // [group][tile]
  auto* states = reinterpret_cast<SoftmaxState*>(scores + group * kAttentionTileKeys);
  std::fill_n(states, group, SoftmaxState());
  std::fill_n(task.out, group * head_dim, 0.0f);

  const float* keys[kAttentionTileKeys];
  const float* values[kAttentionTileKeys];
  for (int64_t key = task.first_key; key < task.end_key;) {
    const int64_t tile_end =
        std::min(task.end_key, (key / kAttentionTileKeys + 1) * kAttentionTileKeys);
    const int64_t num_keys = tile_end - key;
    for (int64_t i = 0; i < num_keys; ++i) {
      const int64_t position = key + i;
      const int64_t offset =
          params.kv.RowOffset(task.block_ids[position / block_tokens], task.kv_head,
                              static_cast<int32_t>(position % block_tokens));
      keys[i] = k_cache + offset;
      values[i] = v_cache + offset;
    }
    for (int64_t i = 0; i < num_keys; ++i) {
      for (int64_t g = 0; g < group; ++g) {
        scores[g * kAttentionTileKeys + i] =
            Dot(task.q + g * head_dim, keys[i], head_dim) * params.softmax_scale;
      }
    }
    for (int64_t g = 0; g < group; ++g) {
      float* tile_scores = scores + g * kAttentionTileKeys;
      const float factor = UpdateSoftmax(tile_scores, num_keys, states[g]);
      AddValues(values, tile_scores, num_keys, factor, head_dim, task.out + g * head_dim);
    }
    key = tile_end;
  }
  for (int64_t g = 0; g < group; ++g) {
    const float inverse = 1.0f / states[g].sum;
    for (int64_t i = 0; i < head_dim; ++i) task.out[g * head_dim + i] *= inverse;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashquant {

HWY_EXPORT(AttendRow);

int64_t AttentionScratchFloats(const PagedAttentionParams& params) {
  const int64_t group = params.num_heads / params.num_kv_heads;
  return group * (kAttentionTileKeys + int64_t{sizeof(float) * 2 / sizeof(float)});
}

void PagedAttentionCpu(const PagedAttentionParams& params, ThreadPool& pool, float* scratch) {
  const AttentionBatch& batch = params.batch;
  const int64_t kv_heads = params.num_kv_heads;
  const int64_t group = params.num_heads / kv_heads;
  const int64_t qkv_stride = (params.num_heads + 2 * kv_heads) * params.head_dim;
  const int64_t scratch_floats = AttentionScratchFloats(params);
  const auto run = [&](int64_t i, int32_t thread) {
    const int64_t row = i / kv_heads;
    const int32_t* indptr_end = batch.query_indptr + batch.num_sequences + 1;
    const int64_t sequence =
        std::upper_bound(batch.query_indptr, indptr_end, row) - batch.query_indptr - 1;
    const int64_t position =
        batch.context_lengths[sequence] - (batch.query_indptr[sequence + 1] - row);
    AttentionTask task;
    task.params = &params;
    task.block_ids = batch.block_ids + batch.block_indptr[sequence];
    task.end_key = position + 1;
    if (params.sliding_window > 0) {
      task.first_key = std::max<int64_t>(0, task.end_key - params.sliding_window);
    }
    task.kv_head = static_cast<int32_t>(i % kv_heads);
    const int64_t head_offset = task.kv_head * group * params.head_dim;
    task.q = static_cast<const float*>(params.qkv) + row * qkv_stride + head_offset;
    task.out =
        static_cast<float*>(params.out) + row * params.num_heads * params.head_dim + head_offset;
    task.scratch = scratch + thread * scratch_floats;
    HWY_DYNAMIC_DISPATCH(AttendRow)(task);
  };
  pool.ParallelFor(batch.num_tokens * kv_heads, run);
}

}  // namespace flashquant
#endif  // HWY_ONCE
