// The INT4 kernel for machines with byte dot products (AVX-512 VNNI), instead of DenseTile.
//
// Each group of x is written as fixed point with 22 bits below the sign, X = x * 2^s with s from
// the group's largest magnitude, and X as three signed bytes d0 + 256 d1 + 65536 d2. A byte dot
// product then takes four inputs at once with the codes as they are, two operations to unpack eight
// of them, and its sums are exact. What is lost is the rounding of x: at most 2^-22 of the group's
// largest |x|, about what adding up floats loses. A row is converted by itself, so its result does
// not depend on others here either.

#if defined(FLASHQUANT_KERNELS_CPU_DIGIT_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHQUANT_KERNELS_CPU_DIGIT_TILE_INL_H_
#undef FLASHQUANT_KERNELS_CPU_DIGIT_TILE_INL_H_
#else
#define FLASHQUANT_KERNELS_CPU_DIGIT_TILE_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <limits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/linear_task.h"
#include "kernels/cpu/linear_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3_DL

inline constexpr bool kInt4TakesDigits = true;

// Vectors of channels for R rows, 3 sums each. More than 12 sums at R = 2 and 4 would fit the 32
// registers, but then the compiler spills.
constexpr int NumDigitVectors(int rows) { return rows == 1 ? 4 : (rows == 2 ? 2 : 1); }

// x of one row and one chunk as digits. x: [num_inputs], at most kMaxChunkInputs; to: the row's
// place in the first group of eight. Returns false when an input is not finite: digits are then 0.
HWY_INLINE bool ChunkDigits(const float* x, int64_t num_inputs, int64_t stride, int32_t* to,
                            float& sum, float& scale) {
  const hn::FixedTag<float, 16> d;
  const hn::FixedTag<int32_t, 16> di;
  const hn::FixedTag<uint8_t, 64> d8;
  HWY_ALIGN float padded[kMaxChunkInputs] = {};
  std::copy_n(x, num_inputs, padded);
  auto max = hn::Zero(di);  // of the bits without the sign, which order like the magnitudes
  for (int64_t k = 0; k < num_inputs; k += 16) {
    max = hn::Max(max, hn::BitCast(di, hn::Abs(hn::Load(d, padded + k))));
  }
  const int32_t exponent = hn::GetLane(hn::MaxOfLanes(di, max)) >> 23;
  const bool finite = exponent < 255;
  // Groups below 2^-100 keep fewer bits: their scale must stay a normal float.
  const int32_t shift = finite ? std::min(21 - (exponent - 127), 120) : 0;
  const auto factor = hn::Set(d, finite ? std::bit_cast<float>((shift + 127) << 23) : 0.0f);
  scale =
      finite ? std::bit_cast<float>((127 - shift) << 23) : std::numeric_limits<float>::quiet_NaN();
  // Even inputs of a group of eight, then odd ones: low nibbles are even. Then from four inputs of
  // three digits to three digits of four inputs.
  HWY_ALIGN static constexpr int32_t kEvenOdd[16] = {0, 2,  4,  6,  1, 3,  5,  7,
                                                     8, 10, 12, 14, 9, 11, 13, 15};
  HWY_ALIGN static constexpr uint8_t kTranspose[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                       2, 6, 10, 14, 3, 7, 11, 15};
  const auto even_odd = hn::SetTableIndices(di, kEvenOdd);
  const auto transpose = hn::LoadDup128(d8, kTranspose);
  const auto low_byte = hn::Set(di, 0xff);
  auto total = hn::Zero(di);
  const int64_t num_groups = CeilDiv<int64_t>(num_inputs, kPackedKMultiple);
  for (int64_t group = 0; group < num_groups; group += 2) {
    const auto value = finite ? hn::Load(d, padded + group * kPackedKMultiple) : hn::Zero(d);
    const auto fixed = hn::NearestInt(hn::Mul(value, factor));
    total = hn::Add(total, fixed);
    // Adding 128 before each shift carries a digit of 128 and more, which a signed byte cannot
    // hold, into the next one.
    const auto carried = hn::ShiftRight<8>(hn::Add(fixed, hn::Set(di, 128)));
    const auto top = hn::ShiftRight<8>(hn::Add(carried, hn::Set(di, 128)));
    const auto digits =
        hn::Or(hn::Or(hn::And(fixed, low_byte), hn::ShiftLeft<8>(hn::And(carried, low_byte))),
               hn::ShiftLeft<16>(hn::And(top, low_byte)));
    const auto sorted = hn::TableLookupLanes(digits, even_odd);
    HWY_ALIGN int32_t words[16];
    hn::Store(hn::BitCast(di, hn::TableLookupBytes(hn::BitCast(d8, sorted), transpose)), di, words);
    const int64_t blocks = group + 1 < num_groups ? 4 : 2;
    for (int64_t b = 0; b < blocks; ++b) {
      std::copy_n(words + 4 * b, 4, to + (2 * group + b) * 4 * stride);
    }
  }
  sum = static_cast<float>(hn::GetLane(hn::SumOfLanes(di, total)));
  return finite;
}

inline void RowDigits(const DigitRow& row) {
  int64_t chunk = 0;
  for (int64_t k = 0; k < row.k; k += row.chunk_inputs, ++chunk) {
    float* sums = row.sums + chunk * 2 * row.stride;
    ChunkDigits(row.x + k, std::min(row.chunk_inputs, row.k - k), row.stride,
                row.digits + k * row.stride, sums[0], sums[row.stride]);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

// Highway's list for this target names AVX-VNNI instead of the AVX-512 VNNI that its run-time test
// asks for.
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni")
namespace flashquant {
namespace HWY_NAMESPACE {

using VecI32 = hn::Vec<hn::FixedTag<int32_t, 16>>;

// acc + sum over each lane's four bytes of code * digit.
HWY_INLINE VecI32 AddByteProducts(VecI32 acc, VecI32 codes, VecI32 digits) {
  return VecI32{_mm512_dpbusd_epi32(acc.raw, codes.raw, digits.raw)};
}

// acc[v][r] += scale * 2^-s * (sum of code * X - zero point * sum of X) for one chunk.
template <int R, int V>
HWY_INLINE void AddDigitChunk(const VectorBase (&base)[V], int64_t group,
                              const float* HWY_RESTRICT x_sums, const VecI32 (&sum)[V][R][3],
                              float* HWY_RESTRICT acc) {
  const F32 d;
  HWY_UNROLL(4)
  for (int v = 0; v < V; ++v) {
    const VecF32 scale = LoadBFloat16(base[v].scales + group * kBlockLanes);
    const VecF32 zero =
        LoadZeroPoints(base[v].zeros == nullptr ? nullptr : base[v].zeros + group * kBlockLanes);
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      float* HWY_RESTRICT to = acc + (v * R + r) * kLanes;
      VecF32 total = hn::MulAdd(hn::ConvertTo(d, sum[v][r][1]), hn::Set(d, 256.0f),
                                hn::ConvertTo(d, sum[v][r][0]));
      total = hn::MulAdd(hn::ConvertTo(d, sum[v][r][2]), hn::Set(d, 65536.0f), total);
      total = hn::NegMulAdd(zero, hn::Set(d, x_sums[r]), total);
      total = hn::Mul(total, hn::Set(d, x_sums[RowStride(R) + r]));
      hn::Store(hn::MulAdd(scale, total, hn::Load(d, to)), d, to);
    }
  }
}

// As DenseTile, for INT4. digits: the rows' [k / 8][even, odd][stride][4].
template <int R, int V>
HWY_NOINLINE void DigitTile(const LinearTask& task, int64_t lane, int64_t k_begin, int64_t k_end,
                            const int32_t* HWY_RESTRICT digits, const float* HWY_RESTRICT x_sums,
                            float* HWY_RESTRICT acc) {
  const hn::FixedTag<int32_t, 16> di;
  const PackedSegment& segment = *task.segment;
  const VecI32 nibble = hn::Set(di, 0x0f0f0f0f);
  VectorBase base[V];
  for (int v = 0; v < V; ++v) base[v] = BaseOf<PackedKind::kInt4>(segment, lane + v * kLanes);
  for (int64_t k = k_begin; k < k_end;) {
    const int64_t chunk_end = std::min(k + segment.chunk_inputs, k_end);
    const int64_t chunk = k / segment.chunk_inputs;
    VecI32 sum[V][R][3];
    HWY_UNROLL(4)
    for (int v = 0; v < V; ++v) {
      HWY_UNROLL(8)
      for (int r = 0; r < R; ++r) {
        sum[v][r][0] = hn::Zero(di);
        sum[v][r][1] = hn::Zero(di);
        sum[v][r][2] = hn::Zero(di);
      }
    }
    for (; k < chunk_end; k += kPackedKMultiple) {
      const int32_t* HWY_RESTRICT x = digits + k * RowStride(R);
      HWY_UNROLL(4)
      for (int v = 0; v < V; ++v) {
        const uint32_t* from = base[v].words + k / kPackedKMultiple * kBlockLanes;
        hwy::Prefetch(from + kPrefetchWords);
        const VecI32 word = hn::Load(di, reinterpret_cast<const int32_t*>(from));
        const VecI32 even = hn::And(word, nibble);
        const VecI32 odd = hn::And(hn::ShiftRight<4>(word), nibble);
        HWY_UNROLL(8)
        for (int r = 0; r < R; ++r) {
          HWY_UNROLL(3)
          for (int digit = 0; digit < 3; ++digit) {
            sum[v][r][digit] =
                AddByteProducts(sum[v][r][digit], even, hn::Set(di, x[4 * r + digit]));
            sum[v][r][digit] = AddByteProducts(sum[v][r][digit], odd,
                                               hn::Set(di, x[4 * (RowStride(R) + r) + digit]));
          }
        }
      }
    }
    AddDigitChunk<R, V>(base, segment.one_group ? 0 : chunk, x_sums + chunk * 2 * RowStride(R), sum,
                        acc);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_POP_ATTRIBUTES
HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {

#else  // HWY_TARGET

inline constexpr bool kInt4TakesDigits = false;
constexpr int NumDigitVectors(int /*rows*/) { return 1; }

// Never called: the target works on floats.
inline void RowDigits(const DigitRow& /*row*/) {}
template <int R, int V>
void DigitTile(const LinearTask&, int64_t, int64_t, int64_t, const int32_t*, const float*, float*) {
}

#endif  // HWY_TARGET

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#endif  // FLASHQUANT_KERNELS_CPU_DIGIT_TILE_INL_H_
