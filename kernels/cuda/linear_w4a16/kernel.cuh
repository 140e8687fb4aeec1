// The fused W4A16 + outlier kernel: y = x * (dequant(codes) + outliers). One persistent block per
// SM; each warp streams its own run of units through its own ring and keeps its sums in registers;
// warps meet only after their activations are staged and, where ranks are not a cluster, at the
// end. Source: paper section on the fused kernel. Deviation from Stream-K (Osama et al., 2023):
// blocks are cut by K slice and whole strips, see kernel_args.h, so that sums of different blocks
// meet inside a cluster. Deviation from design "kernel" 6: with bulk copies the ring is not filled
// before the activations are there, but for a stage; measured, see BENCHMARKS.
#pragma once

#include <type_traits>

#include "kernels/cuda/linear_w4a16/dense.cuh"
#include "kernels/cuda/linear_w4a16/join.cuh"
#include "kernels/cuda/linear_w4a16/outlier_path.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/stage_ring.cuh"

namespace flashquant::cuda {

// A position in a warp's run of the block's local units.
struct UnitCursor {
  int strip;  // local
  int unit;   // inside the block's part of the strip
  int unit_of_layer;

  __device__ UnitCursor(const KernelArgs& args, const BlockShare& share, const RunBegin& run) {
    strip = run.strip();
    unit = run.unit - strip * share.num_units;
    unit_of_layer = (share.strip_begin + strip) * args.num_units + share.unit_begin + unit;
  }
  __device__ void Skip(const KernelArgs& args, const BlockShare& share, int count) {
    unit_of_layer += count;
    unit += count;
    while (unit >= share.num_units) {
      unit -= share.num_units;
      ++strip;
      unit_of_layer += args.num_units - share.num_units;
    }
  }
  __device__ void Next(const KernelArgs& args, const BlockShare& share) {
    ++unit_of_layer;
    if (++unit == share.num_units) {
      unit = 0;
      ++strip;
      unit_of_layer += args.num_units - share.num_units;
    }
  }
};

__device__ __forceinline__ OutlierRef LoadRef(const KernelArgs& args, const UnitCursor& at) {
  if (args.outlier_index == nullptr) return OutlierRef{};
  const uint2 v = __ldg(reinterpret_cast<const uint2*>(args.outlier_index) + at.unit_of_layer);
  return OutlierRef{v.x, v.y};
}

// Sizes of the records in the stages, the next unit's lowest, in 16 bytes: in a register, because a
// unit begins with them. Records of more than one piece count as kMany.
class RecordSizes {
 public:
  static constexpr uint32_t kMany = kMaxPieceBytes / 16 + 1;

  // Lane i has that of unit i, 0 behind the last.
  __device__ RecordSizes(int lane, uint32_t num_16bytes) {
    const uint32_t size = min(num_16bytes, kMany) << (kBits * (lane % kInWord));
    const uint32_t low = __reduce_or_sync(0xffffffffu, lane < kInWord ? size : 0);
    const uint32_t high =
        __reduce_or_sync(0xffffffffu, lane >= kInWord && lane < kMaxStages ? size : 0);
    sizes_ = low | static_cast<uint64_t>(high) << (kBits * kInWord);
  }

  __device__ uint32_t Pop() {
    const auto size = static_cast<uint32_t>(sizes_) & kMask;
    sizes_ >>= kBits;
    return size;
  }
  // `ahead`: units between the next one to pop and this.
  __device__ void Put(int ahead, uint32_t num_16bytes) {
    sizes_ |= static_cast<uint64_t>(min(num_16bytes, kMany)) << (kBits * ahead);
  }

 private:
  static constexpr int kBits = 10;
  static constexpr int kInWord = 3;
  static constexpr uint32_t kMask = (1u << kBits) - 1;
  static_assert(kMany <= kMask && kMaxStages <= 2 * kInWord);
  static_assert(kMaxStages == StageRing<true>::kMaxStages);

  uint64_t sizes_;
};

__device__ __forceinline__ uint32_t FirstPieceBytes(const OutlierRef& ref) {
  return min(ref.num_16bytes * 16, static_cast<uint32_t>(kMaxPieceBytes));
}

__device__ __forceinline__ const uint8_t* DenseOf(const KernelArgs& args, const UnitCursor& at) {
  return args.dense + static_cast<uint64_t>(at.unit_of_layer) * args.unit_dense_bytes;
}
__device__ __forceinline__ const uint8_t* OutliersOf(const KernelArgs& args,
                                                     const OutlierRef& ref) {
  return args.outliers + static_cast<uint64_t>(ref.offset) * 16;
}

// Pieces of a unit's outliers behind the first, which only tiles of more than an eighth outliers
// have: they come through the first one's place one after the other.
template <int kBatchBlocks, bool kBulk>
__device__ __forceinline__ void AddMorePieces(const KernelArgs& args, const UnitCursor& at,
                                              StageRing<kBulk>& ring, int stage, uint32_t x,
                                              int lane, Accumulators<kBatchBlocks>& acc) {
  constexpr uint32_t kPiece = kMaxPieceBytes / 16;
  const OutlierRef ref = LoadRef(args, at);
#pragma unroll 1
  for (uint32_t done = kPiece; done < ref.num_16bytes; done += kPiece) {
    const uint32_t size = min(ref.num_16bytes - done, kPiece);
    __syncwarp();
    ring.CopyNow(stage, args.unit_dense_bytes,
                 args.outliers + (static_cast<uint64_t>(ref.offset) + done) * 16, size * 16);
    const OutlierRounds rounds(ring.Address(stage) + args.unit_dense_bytes, size - 1, lane);
    AddOutliers<kBatchBlocks>(args, rounds, rounds.Load(0), x, lane, acc);
  }
}

// Adds chunk `chunk` of the block's slice, whose packed weight is at shared address `record`.
template <int kBatchBlocks, int kGroups, bool kZeros>
__device__ __forceinline__ void AddChunk(const KernelArgs& args, uint32_t record, uint32_t chunk,
                                         uint32_t shared, uint32_t lane_x_row, int lane,
                                         Accumulators<kBatchBlocks>& acc) {
  const uint32_t x = shared + args.shared.x_offset + chunk * kXChunkBytes + lane_x_row;
  const uint32_t starts =
      shared + args.shared.starts_offset + chunk * kGroups * kBatchBlocks * kStartBytes;
  AddDense<kBatchBlocks, kGroups, kZeros>(args, record, x, starts, lane, acc);
}

// The parts of shared strips for which there was not a unit, in blocks of few.
template <int kBatchBlocks>
__device__ __forceinline__ void SendEmptyParts(const BlockShare& share, const RunBegin& run,
                                               const RunBegin& run_end,
                                               RankExchange<kBatchBlocks>& exchange) {
  Accumulators<kBatchBlocks> zeros;
  Clear<kBatchBlocks>(zeros);
  if (run.cut() && run.unit == min(run_end.unit, (run.strip() + 1) * share.num_units)) {
    exchange.SendPart(run, run.part(), zeros);
  }
  const bool begins = run_end.cut() && (run_end.strip() > run.strip() || !run.cut());
  if (begins && run_end.unit == max(run.unit, run_end.strip() * share.num_units)) {
    exchange.SendPart(run_end, run_end.part() - 1, zeros);
  }
}

// The sum of the run's units of a strip is in `acc`: hands in a whole strip's, sends that of a
// shared one or leaves it in `slot`.
template <int kBatchBlocks, bool kCluster, typename Exchange>
__device__ __forceinline__ void EndStrip(const KernelArgs& args, const BlockShare& share,
                                         const RunBegin& run, const RunBegin& run_end, int strip,
                                         Exchange& exchange, uint8_t* slot, int lane,
                                         const Accumulators<kBatchBlocks>& acc) {
  const bool begun = strip > run.strip() || !run.cut();
  const bool ended = strip < run_end.strip();
  if constexpr (kCluster) {
    if (begun && ended) {
      exchange.HandIn(acc);
    } else {
      exchange.SendPart(ended ? run : run_end, ended ? run.part() : run_end.part() - 1, acc);
    }
  } else if (begun && ended) {
    HandIn<kBatchBlocks>(args, share, strip, lane, acc);
  } else {
    StoreSlot<kBatchBlocks>(slot, lane, acc);
  }
}

// A warp's run, after the activations are there.
template <int kBatchBlocks, int kGroups, bool kZeros, bool kBulk, bool kCluster, typename Exchange>
__device__ __forceinline__ void RunUnits(const KernelArgs& args, const BlockShare& share,
                                         UnitCursor at, const RunBegin& run,
                                         const RunBegin& run_end, UnitCursor fill,
                                         StageRing<kBulk>& ring, Exchange& exchange,
                                         RecordSizes sizes, uint8_t* shared, uint32_t ring_offset,
                                         int warp, int lane) {
  const uint32_t shared_base = SharedAddress(shared);
  const uint32_t lane_x_row = LaneXRow(lane);
  const uint32_t chunk_bytes = args.unit_dense_bytes / kUnitChunks;
  const int num_run = run_end.unit - run.unit;
  // With more rows a unit takes longer, and its codes' place would be empty meanwhile; with few,
  // the second request costs more than it brings.
  constexpr bool kEarlyRefill = kBatchBlocks > 1;
  OutlierRef next;  // of unit `fill`, loaded one unit ahead of use
  if (args.stages < num_run) next = LoadRef(args, fill);
  Accumulators<kBatchBlocks> acc;
  Clear<kBatchBlocks>(acc);
  int stage = 0;
#pragma unroll 1
  for (int i = 0; i < num_run; ++i) {
    ring.Wait(stage);
    const uint32_t record = ring.Address(stage);
    const uint32_t outliers = sizes.Pop();
    OutlierRounds rounds;
    OutlierRounds::Round round = {};
    const auto load_first_round = [&] {
      rounds = OutlierRounds(record + args.unit_dense_bytes,
                             min(outliers, static_cast<uint32_t>(kMaxPieceBytes / 16)) - 1, lane);
      round = rounds.Load(0);
    };
    if (outliers != 0 && i != 0) load_first_round();
    const bool refill = i + args.stages < num_run;
    // With several groups and 16 rows, two chunks in one piece would not fit the registers.
    constexpr int kAtOnce = kGroups == 1 || kBatchBlocks != 2 ? kUnitChunks : 1;
#pragma unroll 1
    for (uint32_t first = 0; first < kUnitChunks; first += kAtOnce) {
#pragma unroll
      for (uint32_t c = first; c < first + kAtOnce; ++c) {
        AddChunk<kBatchBlocks, kGroups, kZeros>(args, record + c * chunk_bytes,
                                                static_cast<uint32_t>(at.unit) * kUnitChunks + c,
                                                shared_base, lane_x_row, lane, acc);
      }
    }
    if (kEarlyRefill) {
      __syncwarp();
      if (refill) ring.CopyFirst(stage, DenseOf(args, fill), args.unit_dense_bytes);
    }
    if (i == 0) {
      ring.WaitForRest();
      if (outliers != 0) load_first_round();
    }
    if (outliers != 0) {
      const uint32_t x =
          shared_base + args.shared.x_offset + at.unit * (kUnitChunks * kXChunkBytes);
      AddOutliers<kBatchBlocks>(args, rounds, round, x, lane, acc);
      if (outliers == RecordSizes::kMany) {
        AddMorePieces<kBatchBlocks, kBulk>(args, at, ring, stage, x, lane, acc);
      }
    }
    __syncwarp();
    if (refill) {
      if (!kEarlyRefill) ring.CopyFirst(stage, DenseOf(args, fill), args.unit_dense_bytes);
      ring.CopyRest(stage, args.unit_dense_bytes, OutliersOf(args, next), FirstPieceBytes(next));
      sizes.Put(args.stages - 1, next.num_16bytes);
      fill.Next(args, share);
      if (i + 1 + args.stages < num_run) next = LoadRef(args, fill);
    } else {
      ring.CopyNothing();
    }
    stage = stage + 1 == args.stages ? 0 : stage + 1;

    const bool strip_end = at.unit + 1 == share.num_units;
    const bool last = i + 1 == num_run;
    if (strip_end || last) {
      EndStrip<kBatchBlocks, kCluster>(
          args, share, run, run_end, at.strip, exchange,
          shared + (last ? ring_offset
                         : args.shared.first_slots_offset + warp * SlotBytes(kBatchBlocks)),
          lane, acc);
      Clear<kBatchBlocks>(acc);
    }
    at.Next(args, share);
  }
  if constexpr (kCluster) SendEmptyParts(share, run, run_end, exchange);
}

// Grid: num_ranks x num_splits blocks (normally one per SM), with kCluster in clusters of
// num_ranks; num_warps * 32 threads. Shared memory: KernelArgs' offsets, the ring last
// (launch.cu). Pointers aligned as launchers.h says. m <= 8 * kBatchBlocks.
template <int kBatchBlocks, int kGroups, bool kZeros, bool kBulk, bool kCluster>
__global__ void __launch_bounds__(kMaxWarpsPerBlock * 32, 1)
    LinearW4A16Kernel(const __grid_constant__ KernelArgs args) {
  if constexpr (kBulk && !kHasMbarriers) return;  // such devices take the other instances
  extern __shared__ __align__(128) uint8_t shared[];
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const BlockShare share(args);
  const RunBegin run = share.runs[warp];
  const RunBegin run_end = share.runs[warp + 1];
  const int num_run = run_end.unit - run.unit;
  const UnitCursor first(args, share, run);

  // Weights do not depend on the kernel before; activations, the workspace and y do. A stage is
  // asked for at once. The others come behind the activations: the requests of all blocks for them
  // would hold up everybody's activations by a microsecond, which costs more than it brings.
  // By cp.async, on devices where this could not be measured, all are asked for at once.
  const int num_fills = min(num_run, args.stages);
  const int num_early = kBulk ? min(num_fills, 1) : num_fills;
  const uint32_t ring_offset = args.shared.ring_offset + warp * args.stages * args.stage_bytes;
  StageRing<kBulk> ring(SharedAddress(shared + ring_offset),
                        SharedAddress(shared + warp * kRingBarrierBytes), args.stages, num_fills,
                        args.stage_bytes, lane);
  UnitCursor fill = first;
  const auto start_fills = [&](int begin, int end) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      ring.StartFirst(i, DenseOf(args, fill), args.unit_dense_bytes);
      fill.Next(args, share);
    }
  };
  start_fills(0, num_early);
  UnitCursor of_lane = first;
  of_lane.Skip(args, share, min(lane, num_fills));
  OutlierRef ref;  // of the unit in stage `lane`
  if (lane < num_fills) ref = LoadRef(args, of_lane);
  ReleaseNextKernel();
  const XSource x(args, share.unit_begin * kUnitChunks, lane);
  std::conditional_t<kCluster, RankExchange<kBatchBlocks>, NoExchange> exchange(
      args, shared, share.rank, share.strip_begin + run.strip() + (run.cut() ? 1 : 0), warp, lane);
  const auto start_rests = [&] {
    ring.StartRests(args.unit_dense_bytes, OutliersOf(args, ref), FirstPieceBytes(ref));
  };
  WaitForPreviousKernel();
  StageActivations<kBatchBlocks, kGroups>(
      args, x, share.num_units * kUnitChunks, shared, warp, lane, [&] {
        if constexpr (kCluster) {
          exchange.Init(run);
          ClusterArrive();
        }
        if (!kBulk) start_rests();  // the rest of a fill that is under way as a whole
      });
  // The index comes from memory, and only now is there nothing else to do.
  if (kBulk) start_rests();
  const RecordSizes sizes(lane, ref.num_16bytes);
  __syncthreads();
  start_fills(num_early, num_fills);
  // All blocks of the cluster run: their shared memory may be written.
  if constexpr (kCluster) ClusterWait();
  RunUnits<kBatchBlocks, kGroups, kZeros, kBulk, kCluster>(args, share, first, run, run_end, fill,
                                                           ring, exchange, sizes, shared,
                                                           ring_offset, warp, lane);
  if constexpr (kCluster) {
    exchange.TakeAll();
    if (run.first_cut()) exchange.TakeShared(run, share.strip_begin + run.strip());
  } else {
    __syncthreads();
    CombineWarps<kBatchBlocks>(args, share, run, shared, warp, lane);
  }
}

template <int kBatchBlocks, bool kZeros, bool kBulk, bool kCluster>
const void* SelectByGroups(int groups_per_chunk) {
  switch (groups_per_chunk) {
    case 1:
      return reinterpret_cast<const void*>(
          &LinearW4A16Kernel<kBatchBlocks, 1, kZeros, kBulk, kCluster>);
    case 2:
      return reinterpret_cast<const void*>(
          &LinearW4A16Kernel<kBatchBlocks, 2, kZeros, kBulk, kCluster>);
    case 4:
      return reinterpret_cast<const void*>(
          &LinearW4A16Kernel<kBatchBlocks, 4, kZeros, kBulk, kCluster>);
    default:
      return nullptr;
  }
}

template <int kBatchBlocks, bool kBulk, bool kCluster = false>
const void* SelectByWeight(int groups_per_chunk, bool has_zeros) {
  return has_zeros ? SelectByGroups<kBatchBlocks, true, kBulk, kCluster>(groups_per_chunk)
                   : SelectByGroups<kBatchBlocks, false, kBulk, kCluster>(groups_per_chunk);
}

}  // namespace flashquant::cuda
