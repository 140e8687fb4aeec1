// The rings of the many-rows kernel: their barriers, and the warps that fill them from global
// memory. Stages of the packed weight and of x are filled here, those of the dequantised tile by
// the dequantising warps.
#pragma once

#include "kernels/cuda/linear_w4a16/many_rows_args.h"
#include "kernels/cuda/primitives/mbarrier.cuh"

namespace flashquant::cuda {

// A place in a ring of stages, and the parity of the phase in which the stage is filled.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Shared addresses of the rings' barriers.
template <int kRows>
struct ManyRowsBarriers {
  static constexpr int kTileStages = TileStages(kRows);
  static constexpr int kXStages = XStages(kRows);

  uint32_t base;

  __device__ uint32_t TileFull(int stage) const { return At(stage); }
  __device__ uint32_t TileEmpty(int stage) const { return At(kTileStages + stage); }
  __device__ uint32_t XFull(int stage) const { return At(2 * kTileStages + stage); }
  __device__ uint32_t XEmpty(int stage) const { return At(2 * kTileStages + kXStages + stage); }
  __device__ uint32_t RawFull(int stage) const { return At(kRaw + stage); }
  __device__ uint32_t RawEmpty(int stage) const { return At(kRaw + kMaxRawStages + stage); }

  __device__ void Init(int raw_stages) const {
    for (int i = 0; i < kTileStages; ++i) {
      InitBarrier(TileFull(i), kTileStrips);
      InitBarrier(TileEmpty(i), 4);
    }
    for (int i = 0; i < kXStages; ++i) {
      InitBarrier(XFull(i), 1);
      InitBarrier(XEmpty(i), 4);
    }
    for (int i = 0; i < raw_stages; ++i) {
      InitBarrier(RawFull(i), kTileStrips);
      InitBarrier(RawEmpty(i), kTileStrips * kDequantGroups);
    }
    FenceProxies();
  }

 private:
  static constexpr int kRaw = 2 * (kTileStages + kXStages);
  __device__ uint32_t At(int i) const { return base + 8 * static_cast<uint32_t>(i); }
};

// A block's place in its run of units: which tile, and which unit of K.
struct UnitWalk {
  int tile;
  int unit;

  __device__ UnitWalk(const ManyRowsArgs& args, int begin)
      : tile(begin / args.num_units), unit(begin % args.num_units) {}
  __device__ void Advance(const ManyRowsArgs& args) {
    if (++unit == args.num_units) {
      unit = 0;
      ++tile;
    }
  }
};

__device__ __forceinline__ int StripOf(const ManyRowsArgs& args, int tile, int strip_in_tile) {
  return min(tile / args.row_tiles * kTileStrips + strip_in_tile, args.num_strips - 1);
}

// Copies the packed weight, one strip a lane.
template <int kRows>
__device__ __forceinline__ void CopyRawUnits(const ManyRowsArgs& args,
                                             const ManyRowsBarriers<kRows>& barriers,
                                             uint32_t shared, int begin, int size, int lane) {
  if (lane >= kTileStrips) return;
  UnitWalk walk(args, begin);
  const auto load_ref = [&](const UnitWalk& at) -> OutlierRef {
    if (args.outlier_index == nullptr) return {};
    const int index = StripOf(args, at.tile, lane) * args.num_units + at.unit;
    const uint2 ref = __ldg(reinterpret_cast<const uint2*>(args.outlier_index) + index);
    return {ref.x, ref.y};
  };
  OutlierRef ref = load_ref(walk);
  RingPlace place;
  for (int i = 0; i < size; ++i) {
    const int64_t index = int64_t{StripOf(args, walk.tile, lane)} * args.num_units + walk.unit;
    WaitForPhase(barriers.RawEmpty(place.stage), place.parity ^ 1);
    const int slot = place.stage * kTileStrips + lane;
    const uint32_t to =
        shared + args.shared.raw_offset + static_cast<uint32_t>(slot) * args.shared.raw_strip_bytes;
    const uint32_t barrier = barriers.RawFull(place.stage);
    // Before the reference, which at the start takes as long to come as the codes.
    ExpectMore(barrier, args.unit_dense_bytes);
    BulkCopy(to, args.dense + index * args.unit_dense_bytes, args.unit_dense_bytes, barrier);
    const OutlierRef now = ref;
    walk.Advance(args);
    if (i + 1 < size) ref = load_ref(walk);
    const uint32_t outlier_bytes =
        min(now.num_16bytes * static_cast<uint32_t>(kQuadBytes), args.shared.outlier_room);
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(shared + args.shared.refs_offset +
                                                         static_cast<uint32_t>(slot) * 8),
                 "r"(now.offset), "r"(now.num_16bytes)
                 : "memory");
    ArriveExpecting(barrier, outlier_bytes);
    if (outlier_bytes != 0) {
      BulkCopy(to + args.unit_dense_bytes, args.outliers + uint64_t{now.offset} * kQuadBytes,
               outlier_bytes, barrier);
    }
    place.Advance(args.shared.raw_stages);
  }
}

// Copies x; one thread.
template <int kRows>
__device__ __forceinline__ void CopyX(const ManyRowsArgs& args,
                                      const ManyRowsBarriers<kRows>& barriers, uint32_t shared,
                                      int begin, int size) {
  constexpr int kHalves = XStageHalves(kRows);
  constexpr int kStageFeatures = kHalves * kHalfFeatures;
  UnitWalk walk(args, begin);
  RingPlace place;
  for (int i = 0; i < size; ++i) {
    const int row = walk.tile % args.row_tiles * kRows;
    for (int feature = 0; feature < kUnitK; feature += kStageFeatures) {
      WaitForPhase(barriers.XEmpty(place.stage), place.parity ^ 1);
      const uint32_t barrier = barriers.XFull(place.stage);
      ArriveExpecting(barrier, kHalves * XHalfBytes(kRows));
      uint32_t to = shared + args.shared.x_offset +
                    static_cast<uint32_t>(place.stage * kHalves) * XHalfBytes(kRows);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        BoxCopy(to, &args.x, walk.unit * kUnitK + feature + half * kHalfFeatures, row, barrier);
        to += XHalfBytes(kRows);
      }
      place.Advance(XStages(kRows));
    }
    walk.Advance(args);
  }
}

}  // namespace flashquant::cuda
