// The loops around the kernels of the linear op: passes over K for a few blocks and up to eight
// rows, the outliers, and the store. Included by linear_int4.cc and linear_dense.cc.
//
// Order of one output's sum, the same for every number of rows: along k inside a chunk (a
// quantization group, or 128 inputs), chunk sums along k; outliers along k in four sums of their
// own, taken in turn; then dense + outliers, then bias.

#if defined(FLASHQUANT_KERNELS_CPU_LINEAR_RUN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHQUANT_KERNELS_CPU_LINEAR_RUN_INL_H_
#undef FLASHQUANT_KERNELS_CPU_LINEAR_RUN_INL_H_
#else
#define FLASHQUANT_KERNELS_CPU_LINEAR_RUN_INL_H_
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/cpu/digit_tile-inl.h"
#include "kernels/cpu/linear_task.h"
#include "kernels/cpu/linear_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Channels that one pass over K covers.
constexpr int64_t UnitLanes(int rows) {
  return std::max<int64_t>(kBlockLanes, NumVectors(rows) * kLanes);
}
inline constexpr int64_t kMaxUnitLanes = 64;
// acc[row] = sum of outlier * x over one channel's quads: four running sums, one for each place in
// the quad. x: [k][S].
template <int S>
HWY_INLINE void SumOutliers(const OutlierQuad* HWY_RESTRICT quad, const OutlierQuad* end,
                            const float* HWY_RESTRICT x, float* HWY_RESTRICT acc) {
  const hn::CappedTag<float, S> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  using V = hn::Vec<decltype(d)>;
  constexpr int64_t kStep = hn::MaxLanes(d);
  constexpr int kParts = static_cast<int>(S / kStep);
  V sum[4][kParts];
  for (int place = 0; place < 4; ++place) {
    for (int part = 0; part < kParts; ++part) sum[place][part] = hn::Zero(d);
  }
  for (; quad != end; ++quad) {
    HWY_UNROLL(4)
    for (int place = 0; place < 4; ++place) {
      const V value =
          hn::BitCast(d, hn::Set(du, static_cast<uint32_t>(quad->value[place].bits) << 16));
      const float* HWY_RESTRICT from = x + int64_t{quad->k[place]} * S;
      HWY_UNROLL(8)
      for (int part = 0; part < kParts; ++part) {
        sum[place][part] = hn::MulAdd(value, hn::LoadU(d, from + part * kStep), sum[place][part]);
      }
    }
  }
  for (int part = 0; part < kParts; ++part) {
    const V total =
        hn::Add(hn::Add(sum[0][part], sum[1][part]), hn::Add(sum[2][part], sum[3][part]));
    hn::StoreU(total, d, acc + part * kStep);
  }
}

// Sums of one pass: dense [vector][R][kLanes] and outliers [channel][stride].
struct UnitSums {
  HWY_ALIGN float dense[kMaxUnitLanes * kRowsPerChunk];
  HWY_ALIGN float outliers[kMaxUnitLanes * kRowsPerChunk];
};

// Writes one block of one row: y = (dense [* row scale]) + outliers + bias. dense, outliers: the
// block's sums of the row.
template <PackedKind kKind, int R>
HWY_INLINE void StoreBlock(const PackedSegment& segment, int64_t block,
                           const float* HWY_RESTRICT dense, const float* HWY_RESTRICT outliers,
                           float* HWY_RESTRICT y) {
  float values[kBlockLanes];
  for (int64_t i = 0; i < kBlockLanes; ++i) {
    values[i] = dense[i / kLanes * R * kLanes + i % kLanes];
  }
  if constexpr (kKind == PackedKind::kInt8) {
    const BFloat16* scales = segment.scales.As<BFloat16>() + block * kBlockLanes;
    for (int64_t i = 0; i < kBlockLanes; ++i) values[i] *= ToFloat(scales[i]) * 0x1p-24f;
  }
  if (outliers != nullptr) {
    for (int64_t i = 0; i < kBlockLanes; ++i) values[i] += outliers[i * RowStride(R)];
  }
  if (segment.bias.num_bytes() > 0) {
    const float* bias = segment.bias.As<float>() + block * kBlockLanes;
    for (int64_t i = 0; i < kBlockLanes; ++i) values[i] += bias[i];
  }
  const int64_t real_lanes = segment.n - block * kBlockLanes;
  if (real_lanes >= kBlockLanes) {
    std::copy_n(values, kBlockLanes, y);
  } else {
    std::copy_n(values, real_lanes, y);
  }
}

template <PackedKind kKind, int R>
HWY_INLINE void StoreUnit(const LinearTask& task, int64_t block, int64_t num_blocks,
                          int64_t first_row, int64_t num_rows, const UnitSums& sums) {
  const PackedSegment& segment = *task.segment;
  const bool has_outliers = segment.outliers.num_bytes() > 0;
  for (int64_t b = 0; b < num_blocks; ++b) {
    float* y = task.y + segment.n_begin + (block + b) * kBlockLanes;
    for (int64_t r = 0; r < num_rows; ++r) {
      const float* outliers = sums.outliers + b * kBlockLanes * RowStride(R) + r;
      StoreBlock<kKind, R>(segment, block + b, sums.dense + b * kBlockLanes * R + r * kLanes,
                           has_outliers ? outliers : nullptr, y + (first_row + r) * task.y_stride);
    }
  }
}

constexpr bool UsesDigits(PackedKind kind) { return kInt4TakesDigits && kind == PackedKind::kInt4; }

template <PackedKind kKind, int R, int V>
HWY_INLINE void RunTile(const LinearTask& task, int64_t lane, int64_t k_begin, int64_t k_end,
                        int64_t first_row, float* HWY_RESTRICT acc) {
  [[maybe_unused]] const float* x_sums =
      task.x_sums == nullptr ? nullptr : task.x_sums + 2 * first_row * task.k_chunks;
  if constexpr (UsesDigits(kKind)) {
    DigitTile<R, V>(task, lane, k_begin, k_end, task.x_digits + first_row * task.k_packed, x_sums,
                    acc);
  } else {
    DenseTile<kKind, R, V>(task, lane, k_begin, k_end, task.x + first_row * task.k_packed, x_sums,
                           acc);
  }
}

// One pass over K: num_blocks blocks (at most UnitLanes) x one chunk of rows.
template <PackedKind kKind, int R>
HWY_INLINE void RunUnit(const LinearTask& task, int64_t block, int64_t num_blocks,
                        int64_t first_row, int64_t num_rows) {
  constexpr int kV = UsesDigits(kKind) ? NumDigitVectors(R) : NumVectors(R);
  const PackedSegment& segment = *task.segment;
  const float* x = task.x == nullptr ? nullptr : task.x + first_row * task.k_packed;
  UnitSums sums;
  std::fill_n(sums.dense, num_blocks * kBlockLanes * R, 0.0f);
  const int64_t num_vectors = num_blocks * kBlockLanes / kLanes;
  const uint32_t* indptr = segment.lane_indptr.As<uint32_t>();
  const OutlierQuad* outliers = segment.outliers.As<OutlierQuad>();
  for (int64_t tile = 0; tile < task.num_tiles; ++tile) {
    const int64_t k = tile * kTileInputs;
    const int64_t k_end = std::min(k + kTileInputs, task.k_packed);
    for (int64_t i = 0; i < num_vectors / kV; ++i) {
      RunTile<kKind, R, kV>(task, block * kBlockLanes + i * kV * kLanes, k, k_end, first_row,
                            sums.dense + i * kV * R * kLanes);
    }
    for (int64_t i = 0; i < num_vectors % kV; ++i) {
      const int64_t v = num_vectors / kV * kV + i;
      RunTile<kKind, R, 1>(task, block * kBlockLanes + v * kLanes, k, k_end, first_row,
                           sums.dense + v * R * kLanes);
    }
  }
  for (int64_t lane = 0; indptr != nullptr && lane < num_blocks * kBlockLanes; ++lane) {
    const uint32_t* range = indptr + block * kBlockLanes + lane;
    SumOutliers<static_cast<int>(RowStride(R))>(outliers + range[0], outliers + range[1], x,
                                                sums.outliers + lane * RowStride(R));
  }
  StoreUnit<kKind, R>(task, block, num_blocks, first_row, num_rows, sums);
}

template <PackedKind kKind, int R>
HWY_INLINE void RunBlocks(const LinearTask& task, int64_t block, int64_t end_block,
                          int64_t first_row, int64_t num_rows) {
  constexpr int64_t kUnit = UnitLanes(R) / kBlockLanes;
  for (; block < end_block; block += kUnit) {
    RunUnit<kKind, R>(task, block, std::min(kUnit, end_block - block), first_row, num_rows);
  }
}

// All rows of the task, a few blocks at a time so that their weights stay in the L2 cache.
template <PackedKind kKind>
HWY_INLINE void RunTask(const LinearTask& task) {
  constexpr int64_t kBlocks = kMaxUnitLanes / kBlockLanes;
  for (int64_t block = task.first_block; block < task.end_block; block += kBlocks) {
    const int64_t end = std::min(block + kBlocks, task.end_block);
    for (int64_t row = task.first_row; row < task.end_row; row += kRowsPerChunk) {
      const int64_t rows = std::min(kRowsPerChunk, task.end_row - row);
      if (rows == 1) {
        RunBlocks<kKind, 1>(task, block, end, row, rows);
      } else if (rows == 2) {
        RunBlocks<kKind, 2>(task, block, end, row, rows);
      } else if (rows <= 4) {
        RunBlocks<kKind, 4>(task, block, end, row, rows);
      } else if (rows <= 6) {
        RunBlocks<kKind, 6>(task, block, end, row, rows);
      } else {
        RunBlocks<kKind, 8>(task, block, end, row, rows);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#endif  // FLASHQUANT_KERNELS_CPU_LINEAR_RUN_INL_H_
