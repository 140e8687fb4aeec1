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

__device__ __forceinline__ Unit LoadUnit(const Unit* unit) {
  const uint2 v = __ldg(reinterpret_cast<const uint2*>(unit));
  return Unit{v.x, v.y};
}

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
                                         StageRing<kBulk>& ring, uint8_t* shared,
                                         uint32_t ring_offset, SlotTable& table, int warp,
                                         int lane) {
  const uint32_t x_base = SharedAddress(shared + args.x_offset);
  const uint32_t sums_base = SharedAddress(shared + args.sums_offset);
  constexpr uint32_t kSumBytes = kGroups * kBatchBlocks * kRowsPerBatchBlock * 4;
  const uint32_t dense_bytes = kCodeBytes + kGroups * kGroupScaleBytes * (args.has_zeros ? 2 : 1);
  const Unit* units = args.units + plan.unit_begin;
  const int num_units = static_cast<int>(plan.num_units);
  uint32_t row = plan.row_begin;
  RowInfo info = LoadRowInfo(args.rows + row);
  bool from_start = (plan.units[0].flags & kUnitRowStart) != 0;
  Unit unit = plan.units[0];
  Unit to_fill = args.stages < num_units ? LoadUnit(units + args.stages) : Unit{};
  float acc[kBlocksPerStrip][kBatchBlocks][4] = {};
#pragma unroll 1
  for (int i = 0; i < num_units; ++i) {
    const bool last = i + 1 == num_units;
    const Unit next_unit = last ? Unit{} : LoadUnit(units + i + 1);
    const uint32_t flags = unit.flags;
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
      ring.Fill(args.records + static_cast<uint64_t>(to_fill.offset) * 16,
                (to_fill.flags & kUnitSizeMask) * 16);
      if (i + args.stages + 1 < num_units) to_fill = LoadUnit(units + i + args.stages + 1);
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
    unit = next_unit;
  }
}

// Grid: plan's blocks (normally one per SM), num_warps * 32 threads. Shared memory: KernelArgs'
// offsets, the ring last (launch.cu). Pointers aligned as launchers.h says. m <= 8 * kBatchBlocks.
template <int kBatchBlocks, int kGroups, bool kBulk>
__global__ void __launch_bounds__(MaxWarps(kBatchBlocks) * 32, 1)
    LinearW4A16Kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32;
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
  // Weights do not depend on the kernel before; activations, the workspace and y do.
  ReleaseNextKernel();
  WaitForPreviousKernel();
  StageActivations<kBatchBlocks, kGroups>(args, plan, shared, warp, lane, [&] {
    FillStages<kBulk>(args, plan, ring, args.early_stages, args.stages);
  });
  __syncthreads();
  if (plan.num_units != 0) {
    RunUnits<kBatchBlocks, kGroups, kBulk>(args, plan, ring, shared, ring_offset, table, warp,
                                           lane);
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
