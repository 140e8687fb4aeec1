// Causal grouped-query attention over the paged KV cache, for prefill and decode rows alike.
//
// A task is one query row and one KV head with the query heads that share it. It walks the row's
// keys in tiles of 64, cut at multiples of 64 from position 0, with a running softmax (the online
// softmax of Milakov and Gimelshein, as in FlashAttention). So the order of every sum is given by
// key positions alone: neither chunked prefill nor the batch can change a row's result. A cache of
// BF16 or FP8 is widened to floats tile by tile, once for all query heads of the group.
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/paged_attention.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include <algorithm>
#include <cmath>
#include <limits>

#include "hwy/cache_control.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/base/bfloat16.h"
#include "kernels/base/float8.h"
#include "kernels/cpu/cpu_kernels.h"

#ifndef FLASHQUANT_KERNELS_CPU_PAGED_ATTENTION_CC_ONCE_
#define FLASHQUANT_KERNELS_CPU_PAGED_ATTENTION_CC_ONCE_
namespace flashquant {

// One query row and one KV head.
struct AttentionTask {
  const PagedAttentionParams* params = nullptr;
  DType kv_dtype = DType::kF32;
  const int32_t* block_ids = nullptr;  // the sequence's blocks
  int64_t first_key = 0;
  int64_t end_key = 0;  // the row's own position + 1
  int32_t kv_head = 0;
  const float* q = nullptr;  // [group][head_dim]
  float* out = nullptr;      // [group][head_dim]
  float* scratch = nullptr;

  KvScales kv_scales() const { return kv_dtype == DType::kF8E4M3 ? params->kv_scales : KvScales(); }
};

}  // namespace flashquant
#endif  // FLASHQUANT_KERNELS_CPU_PAGED_ATTENTION_CC_ONCE_

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;

// scores[h][key] = scale * dot of query head h and key, for KB keys and HB heads at a time. Each
// dot is one sum over D / lanes vectors, then over the lanes: no blocking changes it.
template <int KB, int HB>
HWY_INLINE void DotBlock(const float* HWY_RESTRICT q, const float* const* keys, int64_t head_dim,
                         float scale, float* HWY_RESTRICT scores) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<D> sum[KB][HB];
  for (int key = 0; key < KB; ++key) {
    for (int head = 0; head < HB; ++head) sum[key][head] = hn::Zero(d);
  }
  int64_t i = 0;
  for (; i + lanes <= head_dim; i += lanes) {
    hn::Vec<D> query[HB];
    HWY_UNROLL(2)
    for (int head = 0; head < HB; ++head) query[head] = hn::LoadU(d, q + head * head_dim + i);
    HWY_UNROLL(4)
    for (int key = 0; key < KB; ++key) {
      const hn::Vec<D> k = hn::LoadU(d, keys[key] + i);
      HWY_UNROLL(2)
      for (int head = 0; head < HB; ++head) {
        sum[key][head] = hn::MulAdd(query[head], k, sum[key][head]);
      }
    }
  }
  HWY_UNROLL(4)
  for (int key = 0; key < KB; ++key) {
    HWY_UNROLL(2)
    for (int head = 0; head < HB; ++head) {
      float total = hn::GetLane(hn::SumOfLanes(d, sum[key][head]));
      for (int64_t j = i; j < head_dim; ++j) total += q[head * head_dim + j] * keys[key][j];
      scores[head * kAttentionTileKeys + key] = total * scale;
    }
  }
}

// Scores of HB query heads for all keys of a tile.
template <int HB>
HWY_INLINE void TileScores(const float* q, const float* const* keys, int64_t num_keys,
                           int64_t head_dim, float scale, float* scores) {
  int64_t key = 0;
  for (; key + 4 <= num_keys; key += 4) {
    DotBlock<4, HB>(q, keys + key, head_dim, scale, scores + key);
  }
  for (; key < num_keys; ++key) DotBlock<1, HB>(q, keys + key, head_dim, scale, scores + key);
}

// out[i ..] = out * factor + sum over keys of weight * value, for N vectors side by side.
template <int N>
HWY_INLINE void AddValueVectors(const float* const* values, const float* weights, int64_t num_keys,
                                float factor, int64_t i, float* out) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<D> sum[N];
  HWY_UNROLL(4)
  for (int n = 0; n < N; ++n) {
    sum[n] = hn::Mul(hn::LoadU(d, out + i + n * lanes), hn::Set(d, factor));
  }
  for (int64_t key = 0; key < num_keys; ++key) {
    const auto weight = hn::Set(d, weights[key]);
    const float* from = values[key] + i;
    HWY_UNROLL(4)
    for (int n = 0; n < N; ++n) {
      sum[n] = hn::MulAdd(weight, hn::LoadU(d, from + n * lanes), sum[n]);
    }
  }
  HWY_UNROLL(4)
  for (int n = 0; n < N; ++n) hn::StoreU(sum[n], d, out + i + n * lanes);
}

HWY_INLINE void AddValues(const float* const* values, const float* weights, int64_t num_keys,
                          float factor, int64_t head_dim, float* out) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(D()));
  int64_t i = 0;
  for (; i + 4 * lanes <= head_dim; i += 4 * lanes) {
    AddValueVectors<4>(values, weights, num_keys, factor, i, out);
  }
  for (; i + lanes <= head_dim; i += lanes) {
    AddValueVectors<1>(values, weights, num_keys, factor, i, out);
  }
  for (; i < head_dim; ++i) {
    float sum = out[i] * factor;
    for (int64_t key = 0; key < num_keys; ++key) sum += weights[key] * values[key][i];
    out[i] = sum;
  }
}

// Asks for a row: a tile's values come in while its scores are computed.
HWY_INLINE void PrefetchRow(const float* row, int64_t head_dim) {
  constexpr int64_t kFloatsPerLine = 64 / sizeof(float);
  for (int64_t i = 0; i < head_dim; i += kFloatsPerLine) hwy::Prefetch(row + i);
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
  // The tile's free places repeat a score, then weigh nothing.
  std::fill(scores + num_keys, scores + kAttentionTileKeys, scores[0]);
  auto tile_max = hn::LoadU(d, scores);
  auto poison = hn::Zero(d);  // of x - x: 0, or NaN once a score is not finite
  for (int64_t key = 0; key < kAttentionTileKeys; key += lanes) {
    const auto score = hn::LoadU(d, scores + key);
    tile_max = hn::Max(tile_max, score);
    poison = hn::Add(poison, hn::Sub(score, score));
  }
  const float max = std::max(state.max, hn::GetLane(hn::MaxOfLanes(d, tile_max)));
  for (int64_t key = 0; key < kAttentionTileKeys; key += lanes) {
    const auto score = hn::LoadU(d, scores + key);
    hn::StoreU(hn::Exp(d, hn::Sub(score, hn::Set(d, max))), d, scores + key);
  }
  std::fill(scores + num_keys, scores + kAttentionTileKeys, 0.0f);
  auto sum = hn::Zero(d);
  for (int64_t key = 0; key < kAttentionTileKeys; key += lanes) {
    sum = hn::Add(sum, hn::LoadU(d, scores + key));
  }
  const float factor = state.sum == 0.0f ? 0.0f : std::exp(state.max - max);
  state.sum = state.sum * factor + hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, poison)));
  state.max = max;
  return factor;
}

// Elements of a cache as floats, exactly; FP8's without their scale.
HWY_INLINE hn::Vec<D> LoadAsFloat(const BFloat16* from) {
  const D d;
  const hn::RebindToUnsigned<D> bits;
  const hn::Rebind<uint16_t, D> narrow;
  const auto raw = hn::LoadU(narrow, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(bits, raw)));
}

HWY_INLINE hn::Vec<D> LoadAsFloat(const Float8E4M3* from) {
  const D d;
  const hn::RebindToUnsigned<D> bits;
  const hn::Rebind<uint8_t, D> narrow;
  const auto raw = hn::PromoteTo(bits, hn::LoadU(narrow, reinterpret_cast<const uint8_t*>(from)));
  const auto magnitude = hn::And(raw, hn::Set(bits, 0x7fu));
  // Of a normal: the value. Of a subnormal 2^-7 (1 + m / 8), and wanted is 2^-6 m / 8: no float
  // subnormal is met on the way.
  const auto as_normal =
      hn::BitCast(d, hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(bits, 120u << 23)));
  const auto as_subnormal = hn::Sub(hn::Add(as_normal, as_normal), hn::Set(d, 0x1p-6f));
  const auto is_subnormal = hn::RebindMask(d, hn::Lt(magnitude, hn::Set(bits, 8u)));
  const auto is_nan = hn::RebindMask(d, hn::Eq(magnitude, hn::Set(bits, uint32_t{kFloat8E4M3Nan})));
  const auto size = hn::IfThenElse(is_nan, hn::Set(d, std::numeric_limits<float>::quiet_NaN()),
                                   hn::IfThenElse(is_subnormal, as_subnormal, as_normal));
  const auto sign = hn::ShiftLeft<24>(hn::AndNot(hn::Set(bits, 0x7fu), raw));
  return hn::Or(size, hn::BitCast(d, sign));
}

template <typename T>
HWY_INLINE void WidenRow(const void* cache, int64_t offset, int64_t head_dim, float* out) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* from = static_cast<const T*>(cache) + offset;
  int64_t i = 0;
  for (; i + lanes <= head_dim; i += lanes) hn::StoreU(LoadAsFloat(from + i), d, out + i);
  for (; i < head_dim; ++i) out[i] = ToFloat(from[i]);
}

// The rows of one tile of keys.
struct KeyTile {
  int64_t num_keys = 0;
  const float* keys[kAttentionTileKeys];
  const float* values[kAttentionTileKeys];
};

// Calls put(i, element offset in the cache) for each key of the tile that holds position `key`,
// from there to the tile's edge or the task's end.
template <typename Put>
HWY_INLINE void ForTileRows(const AttentionTask& task, int64_t key, KeyTile& tile, const Put& put) {
  const PagedKvGeometry& kv = task.params->kv;
  const int64_t edge = (key / kAttentionTileKeys + 1) * kAttentionTileKeys;
  tile.num_keys = std::min(task.end_key, edge) - key;
  for (int64_t i = 0; i < tile.num_keys; ++i) {
    const int64_t block = (key + i) / kv.block_tokens;
    const auto place = static_cast<int32_t>((key + i) % kv.block_tokens);
    const int64_t offset = kv.RowOffset(task.block_ids[block], task.kv_head, place);
    put(i, offset);
  }
}

HWY_INLINE void FindTile(const AttentionTask& task, int64_t key, KeyTile& tile) {
  ForTileRows(task, key, tile, [&](int64_t i, int64_t offset) HWY_ATTR {
    tile.keys[i] = static_cast<const float*>(task.params->k_cache) + offset;
    tile.values[i] = static_cast<const float*>(task.params->v_cache) + offset;
  });
  for (int64_t i = 0; i < tile.num_keys; ++i) PrefetchRow(tile.values[i], task.params->head_dim);
}

// The same for a cache of T: `rows`, [2][tile keys][head_dim], gets the tile's keys and values.
template <typename T>
HWY_INLINE void WidenTile(const AttentionTask& task, int64_t key, float* rows, KeyTile& tile) {
  const int64_t head_dim = task.params->head_dim;
  float* values = rows + kAttentionTileKeys * head_dim;
  ForTileRows(task, key, tile, [&](int64_t i, int64_t offset) HWY_ATTR {
    WidenRow<T>(task.params->k_cache, offset, head_dim, rows + i * head_dim);
    WidenRow<T>(task.params->v_cache, offset, head_dim, values + i * head_dim);
    tile.keys[i] = rows + i * head_dim;
    tile.values[i] = values + i * head_dim;
  });
}

void AttendRow(const AttentionTask& task) {
  const PagedAttentionParams& params = *task.params;
  const int64_t head_dim = params.head_dim;
  const int64_t group = params.num_heads / params.num_kv_heads;
  float* scores = task.scratch;  // [group][tile]
  auto* states = reinterpret_cast<SoftmaxState*>(scores + group * kAttentionTileKeys);
  std::fill_n(states, group, SoftmaxState());
  std::fill_n(task.out, group * head_dim, 0.0f);
  float* rows = scores + group * (kAttentionTileKeys + 2);
  const float score_scale = params.softmax_scale * task.kv_scales().k;

  KeyTile tile;
  for (int64_t key = task.first_key; key < task.end_key; key += tile.num_keys) {
    switch (task.kv_dtype) {
      case DType::kBF16:
        WidenTile<BFloat16>(task, key, rows, tile);
        break;
      case DType::kF8E4M3:
        WidenTile<Float8E4M3>(task, key, rows, tile);
        break;
      default:
        FindTile(task, key, tile);
    }
    for (int64_t g = 0; g < group; g += 2) {
      const float* q = task.q + g * head_dim;
      float* tile_scores = scores + g * kAttentionTileKeys;
      if (g + 2 <= group) {
        TileScores<2>(q, tile.keys, tile.num_keys, head_dim, score_scale, tile_scores);
      } else {
        TileScores<1>(q, tile.keys, tile.num_keys, head_dim, score_scale, tile_scores);
      }
    }
    for (int64_t g = 0; g < group; ++g) {
      float* tile_scores = scores + g * kAttentionTileKeys;
      const float factor = UpdateSoftmax(tile_scores, tile.num_keys, states[g]);
      AddValues(tile.values, tile_scores, tile.num_keys, factor, head_dim, task.out + g * head_dim);
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    const float inverse = task.kv_scales().v / states[g].sum;
    for (int64_t i = 0; i < head_dim; ++i) task.out[g * head_dim + i] *= inverse;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashquant {

HWY_EXPORT(AttendRow);

int64_t AttentionScratchFloats(const PagedAttentionParams& params, DType kv_dtype) {
  const int64_t group = params.num_heads / params.num_kv_heads;
  // A tile of scores and a SoftmaxState of two floats; a widened tile of keys and of values.
  return group * (kAttentionTileKeys + 2) +
         (kv_dtype == DType::kF32 ? 0 : int64_t{2} * kAttentionTileKeys * params.head_dim);
}

void PagedAttentionCpu(const PagedAttentionParams& params, DType kv_dtype, ThreadPool& pool,
                       float* scratch) {
  const AttentionBatch& batch = params.batch;
  const int64_t kv_heads = params.num_kv_heads;
  const int64_t group = params.num_heads / kv_heads;
  const int64_t qkv_stride = (params.num_heads + 2 * kv_heads) * params.head_dim;
  const int64_t scratch_floats = AttentionScratchFloats(params, kv_dtype);
  const auto run = [&](int64_t i, int32_t thread) {
    const int64_t row = i / kv_heads;
    const int32_t* indptr_end = batch.query_indptr + batch.num_sequences + 1;
    const int64_t sequence =
        std::upper_bound(batch.query_indptr, indptr_end, row) - batch.query_indptr - 1;
    if (batch.context_lengths[sequence] == 0) return;
    const int64_t position =
        batch.context_lengths[sequence] - (batch.query_indptr[sequence + 1] - row);
    AttentionTask task;
    task.params = &params;
    task.kv_dtype = kv_dtype;
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
