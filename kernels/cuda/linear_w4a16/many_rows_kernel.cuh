// The fused kernel for many rows (sm_90a): y = x * (dequant(codes) + outliers) by warpgroup MMAs
// from shared memory. The warpgroups of a block have roles and meet only at barriers of ring
// stages, so that each runs ahead as far as its ring allows, over the ends of tiles too:
//   the first one multiplies and writes the sums;
//   the next ones dequantise, chunk after chunk in turn, and add the outliers to the dequantised
//   tile, a warp for each strip;
//   the last one copies: one warp the packed weight, another x.
// An outlier's weight is rounded to BF16 with what is dequantised below it (zero where the
// quantizer replaces weights by outliers).
#pragma once

#include "kernels/cuda/linear_w4a16/many_rows_dequant.cuh"
#include "kernels/cuda/linear_w4a16/many_rows_stages.cuh"
#include "kernels/cuda/linear_w4a16/many_rows_sums.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/wgmma.cuh"

namespace flashquant::cuda {

// A dequantising warp: strip `strip` of chunks group, group + kDequantGroups, ...
template <int kRows, int kGroups, bool kZeros>
__device__ __forceinline__ void DequantChunks(const ManyRowsArgs& args,
                                              const ManyRowsBarriers<kRows>& barriers,
                                              uint32_t shared, int size, int group, int strip,
                                              int lane) {
  static_assert(TileStages(kRows) >= kDequantGroups, "a stage's phases must not be skipped");
  RingPlace raw_place;
  RingPlace tile_place;
  int next = group;
  for (int i = 0; i < group; ++i) tile_place.Advance(TileStages(kRows));
  // Every group waits for and gives back every unit, so that none meets a phase twice removed.
  for (int unit = 0; unit < size; ++unit) {
    WaitForPhase(barriers.RawFull(raw_place.stage), raw_place.parity);
    if (next < (unit + 1) * kUnitChunks) {
      const int slot = raw_place.stage * kTileStrips + strip;
      const uint32_t raw = shared + args.shared.raw_offset +
                           static_cast<uint32_t>(slot) * args.shared.raw_strip_bytes;
      const auto half = static_cast<uint32_t>(next % kUnitChunks);
      LaneCodes<kGroups, kZeros> codes;
      codes.Load(raw + half * (args.unit_dense_bytes / kUnitChunks), lane);
      LaneOutliers outliers;
      outliers.Load(shared + args.shared.refs_offset + static_cast<uint32_t>(slot) * 8,
                    raw + args.unit_dense_bytes, args.shared.outlier_room, lane);
      // All is in registers now, but for long records. The fence keeps the next copy behind these
      // reads: without it, copies have overtaken them.
      const bool is_read = !outliers.HasMore();
      if (is_read) {
        FenceProxies();
        __syncwarp();
        if (lane == 0) Arrive(barriers.RawEmpty(raw_place.stage));
      }
      const uint32_t rows = shared + static_cast<uint32_t>(tile_place.stage) * kTileChunkBytes +
                            static_cast<uint32_t>(strip * kStripN) * 128;
      WaitForPhase(barriers.TileEmpty(tile_place.stage), tile_place.parity ^ 1);
      codes.Store(rows, lane);
      __syncwarp();
      outliers.Add(raw + args.unit_dense_bytes, args.shared.outlier_room,
                   reinterpret_cast<const uint4*>(args.outliers), rows, half, lane);
      FenceProxies();
      __syncwarp();
      if (lane == 0) {
        Arrive(barriers.TileFull(tile_place.stage));
        if (!is_read) Arrive(barriers.RawEmpty(raw_place.stage));
      }
      next += kDequantGroups;
#pragma unroll
      for (int i = 0; i < kDequantGroups; ++i) tile_place.Advance(TileStages(kRows));
    } else if (lane == 0) {
      Arrive(barriers.RawEmpty(raw_place.stage));
    }
    raw_place.Advance(args.shared.raw_stages);
  }
}

// sums += tile * x of 64 features, given by their descriptors.
template <int kRows>
__device__ __forceinline__ void MultiplyHalf(uint64_t tile, uint64_t x, TileSums<kRows>& sums) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      // 64 rows of 128 bytes; 16 features.
      WgmmaBf16(sums[block], tile + block * (64 * 128 / 16) + step * 2, x + step * 2);
    }
  }
}

// The stages that a chunk is in.
template <int kRows>
struct ChunkStages {
  static constexpr int kCount = 2 / XStageHalves(kRows);  // of x
  int tile;
  int x[kCount];

  // By each multiplying warp.
  __device__ __forceinline__ void GiveBack(const ManyRowsBarriers<kRows>& barriers,
                                           int lane) const {
    if (lane != 0) return;
    Arrive(barriers.TileEmpty(tile));
#pragma unroll
    for (int i = 0; i < kCount; ++i) Arrive(barriers.XEmpty(x[i]));
  }
};

// The multiplying warpgroup's places in its rings.
template <int kRows>
class Multiplier {
 public:
  __device__ Multiplier(const ManyRowsArgs& args, const ManyRowsBarriers<kRows>& barriers,
                        uint32_t shared, int lane)
      : barriers_(barriers),
        tiles_(SwizzledDescriptor(shared)),
        x_(SwizzledDescriptor(shared + args.shared.x_offset)),
        lane_(lane) {}

  // sums = tile * x over `num_chunks` chunks. A chunk's stages are given back when the next chunk's
  // MMAs are queued.
  __device__ __forceinline__ void Run(int num_chunks, TileSums<kRows>& sums) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) (&sums[0][0][0])[i] = 0.0f;
    ChunkStages<kRows> before = {};
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      const ChunkStages<kRows> now = Queue(sums);
      if (chunk > 0) {
        WgmmaWait<1>();
        before.GiveBack(barriers_, lane_);
      }
      before = now;
    }
    WgmmaWait<0>();
    before.GiveBack(barriers_, lane_);
  }

 private:
  static constexpr int kHalves = XStageHalves(kRows);
  static constexpr uint64_t kDescriptorUnit = 16;  // bytes

  // Queues the next chunk's MMAs.
  __device__ __forceinline__ ChunkStages<kRows> Queue(TileSums<kRows>& sums) {
    ChunkStages<kRows> stages;
    WaitForPhase(barriers_.TileFull(tile_place_.stage), tile_place_.parity);
    stages.tile = tile_place_.stage;
    const uint64_t tile =
        tiles_ + static_cast<uint64_t>(stages.tile) * (kTileChunkBytes / kDescriptorUnit);
#pragma unroll
    for (int i = 0; i < ChunkStages<kRows>::kCount; ++i) {
      WaitForPhase(barriers_.XFull(x_place_.stage), x_place_.parity);
      stages.x[i] = x_place_.stage;
      WgmmaFence();
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        MultiplyHalf<kRows>(tile + (i * kHalves + half) * (kTileHalfBytes / kDescriptorUnit),
                            x_ + static_cast<uint64_t>(stages.x[i] * kHalves + half) *
                                     (XHalfBytes(kRows) / kDescriptorUnit),
                            sums);
      }
      x_place_.Advance(XStages(kRows));
    }
    WgmmaCommit();
    tile_place_.Advance(TileStages(kRows));
    return stages;
  }

  const ManyRowsBarriers<kRows>& barriers_;
  const uint64_t tiles_;
  const uint64_t x_;
  const int lane_;
  RingPlace tile_place_;
  RingPlace x_place_;
};

template <int kRows>
__device__ __forceinline__ void MultiplyTiles(const ManyRowsArgs& args,
                                              const ManyRowsBarriers<kRows>& barriers,
                                              uint32_t shared, int begin, int size, int thread) {
  Multiplier<kRows> multiplier(args, barriers, shared, thread % 32);
  UnitWalk walk(args, begin);
  while (size > 0) {
    const int units = min(size, args.num_units - walk.unit);
    TileSums<kRows> sums;
    multiplier.Run(units * kUnitChunks, sums);
    if (units == args.num_units) {
      WriteTile<kRows>(args, walk.tile, thread / 32, thread % 32, sums);
    } else {
      JoinTile<kRows>(args, walk.tile, thread, sums);
    }
    size -= units;
    ++walk.tile;
    walk.unit = 0;
  }
}

// One block an SM.
template <int kRows, int kGroups, bool kZeros>
__global__ void __launch_bounds__(kManyRowsThreads, 1)
    LinearW4A16ManyRowsKernel(const __grid_constant__ ManyRowsArgs args) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t shared = (SharedAddress(dynamic_shared) + 1023) & ~1023u;
  const ManyRowsBarriers<kRows> barriers{shared + args.shared.barrier_offset};
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  const int lane = thread % 32;
  const int begin = args.units.Begin(static_cast<int>(blockIdx.x));
  const int size = args.units.Size(static_cast<int>(blockIdx.x));
  if (thread == 0) barriers.Init(args.shared.raw_stages);
  __syncthreads();
  ReleaseNextKernel();
  if (warp < 4) {
    GrowRegisters<MultiplyRegisters(kRows)>();
    WaitForPreviousKernel();
    MultiplyTiles<kRows>(args, barriers, shared, begin, size, thread);
  } else if (warp < 4 * (1 + kDequantGroups)) {
    GiveUpRegisters<DequantRegisters(kRows)>();
    DequantChunks<kRows, kGroups, kZeros>(args, barriers, shared, size, warp / 4 - 1, warp % 4,
                                          lane);
  } else {
    GiveUpRegisters<kCopyRegisters>();
    const int copier = warp - 4 * (1 + kDequantGroups);
    if (copier == 0) {
      CopyRawUnits<kRows>(args, barriers, shared, begin, size, lane);
    } else if (copier == 1 && lane == 0) {
      WaitForPreviousKernel();
      CopyX<kRows>(args, barriers, shared, begin, size);
    }
  }
}

template <int kRows, bool kZeros>
const void* SelectManyRowsByGroups(int groups_per_chunk) {
  switch (groups_per_chunk) {
    case 1:
      return reinterpret_cast<const void*>(&LinearW4A16ManyRowsKernel<kRows, 1, kZeros>);
    case 2:
      return reinterpret_cast<const void*>(&LinearW4A16ManyRowsKernel<kRows, 2, kZeros>);
    case 4:
      return reinterpret_cast<const void*>(&LinearW4A16ManyRowsKernel<kRows, 4, kZeros>);
    default:
      return nullptr;
  }
}

template <int kRows>
const void* SelectManyRows(int groups_per_chunk, bool has_zeros) {
  return has_zeros ? SelectManyRowsByGroups<kRows, true>(groups_per_chunk)
                   : SelectManyRowsByGroups<kRows, false>(groups_per_chunk);
}

}  // namespace flashquant::cuda
