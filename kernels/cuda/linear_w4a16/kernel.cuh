// The fused W4A16 + outlier kernel: y = x * (dequant(codes) + outliers). One persistent block per
// SM; each warp streams its own run of records through its own ring and keeps its sums in
// registers; warps meet only after their activations are staged and at the very end.
// Source: paper section on the fused kernel; Stream-K (Osama et al., 2023) for the split.
#pragma once

#include "kernels/cuda/linear_w4a16/outlier_path.cuh"
#include "kernels/cuda/linear_w4a16/stream_k.cuh"
#include "kernels/cuda/primitives/stage_ring.cuh"

namespace flashquant::cuda {

// Reads a warp's plan: 16 words, one a lane, given to all lanes.
__device__ __forceinline__ WarpPlan LoadWarpPlan(const WarpPlan* plan, int lane) {
  const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(plan) + (lane & 15));
  WarpPlan out;
  uint32_t* words = reinterpret_cast<uint32_t*>(&out);
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i] = __shfl_sync(0xffffffffu, word, i);
  return out;
}

// A warp's list of units, read 32 at a time, one a lane, and half of that ahead of use: a load for
// every unit would stall each of them.
class UnitList {
 public:
  __device__ UnitList(const Unit* units, int num_units, int lane)
      : units_(units),
        num_units_(num_units),
        lane_(lane),
        now_(Load(lane)),
        next_(Load(lane + 16)) {}

  // Called with rising i, once for each; afterwards Get(i) .. Get(i + 15) are valid.
  __device__ void MoveTo(int i) {
    if (i - begin_ < 16) return;
    begin_ += 16;
    now_ = next_;
    next_ = Load(begin_ + 16 + lane_);
  }
  __device__ Unit Get(int i) const {
    return Unit{__shfl_sync(0xffffffffu, now_.x, i - begin_),
                __shfl_sync(0xffffffffu, now_.y, i - begin_)};
  }

 private:
  __device__ uint2 Load(int i) const {
    return i < num_units_ ? __ldg(reinterpret_cast<const uint2*>(units_ + i)) : uint2{0, 0};
  }

  const Unit* units_;
  int num_units_;
  int lane_;
  int begin_ = 0;
  uint2 now_;   // unit begin_ + lane
  uint2 next_;  // unit begin_ + 16 + lane
};

// Brings the warp's lists nearer: they are read one by one later, each a miss otherwise.
__device__ __forceinline__ void PrefetchLists(const KernelArgs& args, const WarpPlan& plan,
                                              int lane) {
  if (lane * 16u < plan.num_units) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(args.units + plan.unit_begin + lane * 16u));
  }
  if (lane == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(args.rows + plan.row_begin));
}

__device__ __forceinline__ RowInfo LoadRowInfo(const RowInfo* row) {
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(row));
  return RowInfo{v.x, v.y, v.z, v.w};
}

// Starts the copies of the warp's items begin .. end - 1.
template <bool kBulk>
__device__ __forceinline__ void FillStages(const KernelArgs& args, const WarpPlan& plan,
                                           StageRing<kBulk>& ring, int begin, int end) {
#pragma unroll
  for (int i = 0; i < kMaxStages; ++i) {
    if (i < begin || i >= end) continue;
    if (i < static_cast<int>(plan.num_units)) {
      ring.Fill(args.records + static_cast<uint64_t>(plan.units[i].offset) * 16,
                (plan.units[i].flags & kUnitSizeMask) * 16);
    } else {
      ring.FillNothing();
    }
  }
}

// What a warp does with its units after the activations are there. Returns through `table` what it
// left in shared memory.
template <int kBatchBlocks, int kGroups, bool kBulk>
__device__ __forceinline__ void RunUnits(const KernelArgs& args, const WarpPlan& plan,
                                         StageRing<kBulk>& ring, UnitList& units, uint8_t* shared,
                                         uint32_t ring_offset, SlotTable& table, int warp,
                                         int lane) {
  const uint32_t x_base = SharedAddress(shared + args.x_offset);
  const uint32_t sums_base = SharedAddress(shared + args.sums_offset);
  constexpr uint32_t kSumBytes = kGroups * kBatchBlocks * kRowsPerBatchBlock * 4;
  const uint32_t dense_bytes = kCodeBytes + kGroups * kGroupScaleBytes * (args.has_zeros ? 2 : 1);
  const int num_units = static_cast<int>(plan.num_units);
  uint32_t row = plan.row_begin;
  RowInfo info = LoadRowInfo(args.rows + row);
  bool from_start = (plan.units[0].flags & kUnitRowStart) != 0;
  float acc[kBlocksPerStrip][kBatchBlocks][4] = {};
#pragma unroll 1
  for (int i = 0; i < num_units; ++i) {
    const bool last = i + 1 == num_units;
    units.MoveTo(i);
    const uint32_t flags = units.Get(i).flags;
    const uint32_t chunk = flags >> kUnitChunkShift & kUnitChunkMask;
    const uint32_t x = x_base + chunk * kXChunkBytes;
    const uint32_t record = ring.Wait();
    const uint32_t num_dense = flags >> kUnitDenseShift & kUnitDenseMask;
    if (num_dense == 0) AddOutliers<kBatchBlocks>(args, record, x, lane, acc);
#pragma unroll 1
    for (uint32_t c = 0; c < num_dense; ++c) {
      AddDense<kBatchBlocks, kGroups>(args, record + c * dense_bytes, x + c * kXChunkBytes,
                                      sums_base + (chunk + c) * kSumBytes, lane, acc);
    }
    __syncwarp();
    ring.Advance();
    if (i + args.stages < num_units) {
      const Unit unit = units.Get(i + args.stages);
      ring.Fill(args.records + static_cast<uint64_t>(unit.offset) * 16,
                (unit.flags & kUnitSizeMask) * 16);
    } else {
      ring.FillNothing();
    }
    const bool row_end = (flags & kUnitRowEnd) != 0;
    if (row_end || last) {
      if (row_end && from_start) {
        FinishBlocks<kBatchBlocks, kBlocksPerStrip>(args, info, row, 0, lane, acc);
      } else {
        const uint32_t slot =
            last ? ring_offset
                 : args.first_slots_offset + plan.first_slot * kSlotBytes<kBatchBlocks>;
        StoreSlot<kBatchBlocks>(shared + slot, lane, acc);
        if (lane == 0) {
          table.row[2 * warp + (last ? 1 : 0)] = row;
          table.offset[2 * warp + (last ? 1 : 0)] = slot;
          table.info[2 * warp + (last ? 1 : 0)] = info;
        }
      }
      if (last) break;
#pragma unroll
      for (int block = 0; block < kBlocksPerStrip; ++block) {
#pragma unroll
        for (int nb = 0; nb < kBatchBlocks; ++nb) {
#pragma unroll
          for (int j = 0; j < 4; ++j) acc[block][nb][j] = 0.0f;
        }
      }
      info = LoadRowInfo(args.rows + ++row);
      from_start = true;
    }
  }
}

// Grid: plan's blocks (normally one per SM), num_warps * 32 threads. Shared memory: KernelArgs'
// offsets, the ring last (launch.cu). Pointers aligned as launchers.h says. m <= 8 * kBatchBlocks.
template <int kBatchBlocks, int kGroups, bool kBulk>
__global__ void __launch_bounds__(MaxWarps(kBatchBlocks) * 32, 1)
    LinearW4A16Kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const WarpPlan plan = LoadWarpPlan(args.warps + blockIdx.x * args.num_warps + warp, lane);
  SlotTable& table = *reinterpret_cast<SlotTable*>(shared + kSharedBarrierBytes);
  if (warp == 0) table.row[lane] = kNoRow;

  const uint32_t ring_offset = args.ring_offset + warp * args.stages * args.stage_bytes;
  StageRing<kBulk> ring(SharedAddress(shared + ring_offset),
                        SharedAddress(shared + warp * kMaxStages * 8), args.stages,
                        args.stage_bytes, lane);
  FillStages<kBulk>(args, plan, ring, 0, args.early_stages);
  PrefetchLists(args, plan, lane);
  UnitList units(args.units + plan.unit_begin, static_cast<int>(plan.num_units), lane);
  // Weights do not depend on the kernel before; activations, the workspace and y do.
  ReleaseNextKernel();
  WaitForPreviousKernel();
  StageActivations<kBatchBlocks, kGroups>(args, plan, shared, warp, lane, [&] {
    FillStages<kBulk>(args, plan, ring, args.early_stages, args.stages);
  });
  __syncthreads();
  if (plan.num_units != 0) {
    RunUnits<kBatchBlocks, kGroups, kBulk>(args, plan, ring, units, shared, ring_offset, table,
                                           warp, lane);
  }
  __syncthreads();
  CombineSlots<kBatchBlocks>(args, shared, table, warp, lane);
}

template <int kBatchBlocks, bool kBulk>
const void* SelectByGroups(int groups_per_chunk) {
  switch (groups_per_chunk) {
    case 1:
      return reinterpret_cast<const void*>(&LinearW4A16Kernel<kBatchBlocks, 1, kBulk>);
    case 2:
      return reinterpret_cast<const void*>(&LinearW4A16Kernel<kBatchBlocks, 2, kBulk>);
    case 4:
      return reinterpret_cast<const void*>(&LinearW4A16Kernel<kBatchBlocks, 4, kBulk>);
    default:
      return nullptr;
  }
}

}  // namespace flashquant::cuda
