// The dense kernel of the linear op, once per SIMD target: a register block of channels x rows runs
// over a tile of K in FP32 multiply-adds. Outliers, bias and the loops around are
// linear_run-inl.h.

#if defined(FLASHQUANT_KERNELS_CPU_LINEAR_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHQUANT_KERNELS_CPU_LINEAR_TILE_INL_H_
#undef FLASHQUANT_KERNELS_CPU_LINEAR_TILE_INL_H_
#else
#define FLASHQUANT_KERNELS_CPU_LINEAR_TILE_INL_H_
#endif

#include <algorithm>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/linear_task.h"

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using U32 = hn::RebindToUnsigned<F32>;
using I32 = hn::RebindToSigned<F32>;
using VecF32 = hn::Vec<F32>;
using VecU32 = hn::Vec<U32>;
inline constexpr int64_t kLanes = hn::MaxLanes(F32());
static_assert(kBlockLanes % kLanes == 0);

// Vectors of channels held in registers for R rows: enough independent sums to hide the FMA's
// latency, few enough that sums, weights and x fit the register file (32 with 16 lanes, else 16).
constexpr int NumVectors(int rows) {
  if (kLanes == 16) return rows <= 4 ? 4 : 2;
  return rows <= 2 ? 4 : (rows <= 4 ? 2 : 1);
}
// How far ahead of the loads the words are prefetched: the hardware does most of it; farther costs.
inline constexpr int64_t kPrefetchWords = 16 * 8;

// Weight J of each lane's word as a float, times a constant of (kind, J) that x or the row scale
// takes back.
template <PackedKind kKind, int J>
HWY_INLINE VecF32 Unpack(VecU32 word) {
  const F32 d;
  const U32 du;
  const I32 di;
  if constexpr (kKind == PackedKind::kInt4) {
    if constexpr (J >= kNibblePhases) word = hn::ShiftRight<16>(word);
    const VecU32 code = hn::And(word, hn::Set(du, 0xfu << (4 * (J % kNibblePhases))));
    return hn::ConvertTo(d, hn::BitCast(di, code));
  } else if constexpr (kKind == PackedKind::kInt8) {
    if constexpr (J < 3) word = hn::ShiftLeft<24 - 8 * J>(word);
    return hn::ConvertTo(d, hn::BitCast(di, hn::And(word, hn::Set(du, 0xff000000u))));
  } else if constexpr (kKind == PackedKind::kBFloat16) {
    return hn::BitCast(d,
                       J == 0 ? hn::ShiftLeft<16>(word) : hn::And(word, hn::Set(du, 0xffff0000u)));
  } else {
    return hn::BitCast(d, word);
  }
}

// sum[v][r] += weight J.. of word v * x of row r, for the rest of the words' weights.
template <PackedKind kKind, int J, int R, int V>
HWY_INLINE void AccumulateWords(const VecU32 (&word)[V], const float* HWY_RESTRICT x,
                                VecF32 (&sum)[V][R]) {
  const F32 d;
  VecF32 weight[V];
  HWY_UNROLL(4)
  for (int v = 0; v < V; ++v) weight[v] = Unpack<kKind, J>(word[v]);
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    const VecF32 x_row = hn::Set(d, x[J * RowStride(R) + r]);
    HWY_UNROLL(4)
    for (int v = 0; v < V; ++v) sum[v][r] = hn::MulAdd(weight[v], x_row, sum[v][r]);
  }
  if constexpr (J + 1 < CodesPerWord(kKind)) AccumulateWords<kKind, J + 1, R, V>(word, x, sum);
}

// Where the arrays of one vector of channels begin.
struct VectorBase {
  const uint32_t* words;
  const BFloat16* scales;
  const uint8_t* zeros;
};

template <PackedKind kKind>
HWY_INLINE VectorBase BaseOf(const PackedSegment& segment, int64_t lane) {
  const int64_t block = lane / kBlockLanes;
  const int64_t offset = lane % kBlockLanes;
  const uint32_t* words = segment.words.As<uint32_t>() + block * segment.words_per_block + offset;
  if (kKind != PackedKind::kInt4) return {words, nullptr, nullptr};
  const int64_t scale = block * segment.scales_per_block + offset;
  return {words, segment.scales.As<BFloat16>() + scale,
          segment.symmetric ? nullptr : segment.zeros.As<uint8_t>() + scale};
}

HWY_INLINE VecF32 LoadBFloat16(const BFloat16* from) {
  const hn::Rebind<uint16_t, F32> du16;
  const VecU32 bits =
      hn::PromoteTo(U32(), hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(F32(), hn::ShiftLeft<16>(bits));
}

HWY_INLINE VecF32 LoadZeroPoints(const uint8_t* from) {
  const hn::Rebind<uint8_t, F32> du8;
  if (from == nullptr) return hn::Set(F32(), 8.0f);
  return hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::LoadU(du8, from)));
}

// acc[v][r] += the chunk's sums: scaled and freed of the zero point for INT4, as they are else.
template <PackedKind kKind, int R, int V>
HWY_INLINE void AddChunk(const VectorBase (&base)[V], int64_t group,
                         const float* HWY_RESTRICT x_sums, const VecF32 (&sum)[V][R],
                         float* HWY_RESTRICT acc) {
  const F32 d;
  HWY_UNROLL(4)
  for (int v = 0; v < V; ++v) {
    VecF32 scale = hn::Zero(d);
    VecF32 zero = hn::Zero(d);
    if constexpr (kKind == PackedKind::kInt4) {
      scale = LoadBFloat16(base[v].scales + group * kBlockLanes);
      zero =
          LoadZeroPoints(base[v].zeros == nullptr ? nullptr : base[v].zeros + group * kBlockLanes);
    }
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      float* HWY_RESTRICT to = acc + (v * R + r) * kLanes;
      VecF32 total = hn::Load(d, to);
      if constexpr (kKind == PackedKind::kInt4) {
        const VecF32 centred = hn::NegMulAdd(zero, hn::Set(d, x_sums[r]), sum[v][r]);
        total = hn::MulAdd(scale, centred, total);
      } else {
        total = hn::Add(total, sum[v][r]);
      }
      hn::Store(total, d, to);
    }
  }
}

// Channels [lane, lane + V vectors) x R rows over inputs [k_begin, k_end), which start a chunk.
// x: the rows' [k][stride]; acc: [V][R][kLanes].
template <PackedKind kKind, int R, int V>
HWY_NOINLINE void DenseTile(const LinearTask& task, int64_t lane, int64_t k_begin, int64_t k_end,
                            const float* HWY_RESTRICT x, const float* HWY_RESTRICT x_sums,
                            float* HWY_RESTRICT acc) {
  const F32 d;
  const U32 du;
  const PackedSegment& segment = *task.segment;
  constexpr int64_t kCodes = CodesPerWord(kKind);
  VectorBase base[V];
  for (int v = 0; v < V; ++v) base[v] = BaseOf<kKind>(segment, lane + v * kLanes);
  for (int64_t k = k_begin; k < k_end;) {
    const int64_t chunk_end = std::min(k + segment.chunk_inputs, k_end);
    const int64_t chunk = k / segment.chunk_inputs;
    VecF32 sum[V][R];
    HWY_UNROLL(4)
    for (int v = 0; v < V; ++v) {
      HWY_UNROLL(8)
      for (int r = 0; r < R; ++r) sum[v][r] = hn::Zero(d);
    }
    for (; k < chunk_end; k += kCodes) {
      VecU32 word[V];
      HWY_UNROLL(4)
      for (int v = 0; v < V; ++v) {
        const uint32_t* from = base[v].words + k / kCodes * kBlockLanes;
        word[v] = hn::Load(du, from);
        hwy::Prefetch(from + kPrefetchWords);
      }
      AccumulateWords<kKind, 0, R, V>(word, x + k * RowStride(R), sum);
    }
    const float* chunk_sums =
        kKind == PackedKind::kInt4 ? x_sums + chunk * 2 * RowStride(R) : nullptr;
    AddChunk<kKind, R, V>(base, segment.one_group ? 0 : chunk, chunk_sums, sum, acc);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#endif  // FLASHQUANT_KERNELS_CPU_LINEAR_TILE_INL_H_
