// Joining partial sums, always in the same order, so that results do not depend on timing.
//   A strip whose units a warp has all (of its block's part of K) is whole: the warp hands its sum
//   in as it goes. Other strips are shared by warps.
//   Ranks as a cluster: each rank owns some channels of every strip and receives all ranks' sums of
//   them by asynchronous stores, of a shared strip every warp's part, which one warp adds in warp
//   and rank order when all have come (RankExchange).
//   Otherwise the warps leave their parts of shared strips in shared memory, of a strip that they
//   go on from in a "first" slot, of their last strip in their own ring, which is free by then;
//   behind a block barrier one warp adds them in warp order and hands them in. Several ranks hand
//   in through the workspace, where whoever arrives last adds all parts in rank order.
// What a lane holds of a strip is four channels of two rows of each batch block (packed_format.h).
#pragma once

#include "kernels/cuda/linear_w4a16/dense.cuh"
#include "kernels/cuda/primitives/cluster.cuh"
#include "kernels/cuda/primitives/mbarrier.cuh"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

// What a thread block computes (kernel_args.h). Its units, strip by strip, are its local units.
struct BlockShare {
  int rank;
  int strip_begin;
  int unit_begin;  // of a strip: the block's part of K
  int num_units;   // of a strip
  const RunBegin* runs;

  __device__ BlockShare(const KernelArgs& args) : rank(static_cast<int>(blockIdx.x)) {
    const int split = static_cast<int>(blockIdx.y);
    strip_begin = args.strips.Begin(split);
    unit_begin = args.units.Begin(rank);
    num_units = args.units.Size(rank);
    runs =
        args.runs[split < args.strips.remainder ? 1 : 0][rank < args.units.remainder ? 1 : 0].begin;
  }
};

__device__ __forceinline__ float4 ToFloat4(const float (&v)[4]) {
  return make_float4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ void AddTo(float (&sum)[4], const float4& v) {
  sum[0] += v.x;
  sum[1] += v.y;
  sum[2] += v.z;
  sum[3] += v.w;
}

template <int kBatchBlocks>
__device__ __forceinline__ void Clear(Accumulators<kBatchBlocks>& acc) {
#pragma unroll
  for (int block = 0; block < kBlocksPerStrip; ++block) {
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[block][nb][j] = 0.0f;
    }
  }
}

template <int kBatchBlocks>
__device__ __forceinline__ void StoreSlot(uint8_t* slot, int lane,
                                          const Accumulators<kBatchBlocks>& acc) {
  float4* out = reinterpret_cast<float4*>(slot) + lane;
#pragma unroll
  for (int i = 0; i < kBlocksPerStrip * kBatchBlocks; ++i) {
    out[i * 32] = ToFloat4(acc[i / kBatchBlocks][i % kBatchBlocks]);
  }
}

// Writes channels 4g .. 4g + 3 of a strip, rows 2t and 2t + 1 of each batch block.
template <int kBatchBlocks>
__device__ __forceinline__ void WriteOutputs(const KernelArgs& args, int strip, int g, int t,
                                             const Accumulators<kBatchBlocks>& acc) {
  const int n = strip * kStripN + 4 * g;
  if (n >= args.n) return;
#pragma unroll
  for (int nb = 0; nb < kBatchBlocks; ++nb) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = nb * kRowsPerBatchBlock + 2 * t + j;
      if (row >= args.m) continue;
      const __nv_bfloat162 low = __floats2bfloat162_rn(acc[0][nb][j], acc[0][nb][j + 2]);
      const __nv_bfloat162 high = __floats2bfloat162_rn(acc[1][nb][j], acc[1][nb][j + 2]);
      uint2 words;
      memcpy(&words.x, &low, 4);
      memcpy(&words.y, &high, 4);
      *reinterpret_cast<uint2*>(args.y + row * args.y_stride + n) = words;
    }
  }
}

// The exchange of one warp with its counterparts in the other ranks of the cluster, strip after
// strip. Rank r owns the channels of lanes with g * num_ranks / 8 == r. Parts of a strip arrive in
// one of join_slots slots by turns, and a warp has taken out all strips but the last join_lag
// before it hands in another. Either there is a slot for every strip, or join_slots = 2 * join_lag:
// then the slot of strip i is free for strip i + 2 * lag, because whoever hands that in has taken
// strip i + lag, which every rank had handed in after taking strip i. The parts of a shared strip
// have places of their own, used once, and are taken by the warp at its first cut.
template <int kBatchBlocks>
class RankExchange {
 public:
  static constexpr int kVectors = kBlocksPerStrip * kBatchBlocks;  // float4 of a lane

  // The strips first_strip, first_strip + 1, ... of the layer are handed in.
  __device__ RankExchange(const KernelArgs& args, uint8_t* shared, int rank, int first_strip,
                          int warp, int lane)
      : args_(args),
        slots_(shared + args.shared.join_slots_offset + warp * args.join_slots * JoinSlotBytes()),
        part_slots_(shared + args.shared.part_slots_offset),
        barriers_(SharedAddress(shared + kJoinBarrierOffset + warp * kMaxJoinSlots * 8)),
        part_barriers_(SharedAddress(shared + kPartBarrierOffset)),
        rank_(rank),
        lane_(lane),
        first_g_(args.join_first[rank]),
        num_g_(args.join_first[rank + 1] - first_g_),
        owner_((lane >> 2) * args.num_ranks / 8),
        owner_g_((lane >> 2) - args.join_first[owner_]),
        next_strip_(first_strip) {}

  // Before the cluster's first barrier. `begin`: of the warp's run.
  __device__ void Init(const RunBegin& begin) {
    if (lane_ != 0) return;
#pragma unroll
    for (int slot = 0; slot < kMaxJoinSlots; ++slot) {
      if (slot >= args_.join_slots) break;
      InitBarrier(barriers_ + 8 * slot, 1);
      ArriveExpecting(barriers_ + 8 * slot, ExpectedBytes());
    }
    if (begin.first_cut()) {
      const uint32_t barrier = part_barriers_ + 8 * begin.shared_strip();
      InitBarrier(barrier, 1);
      ArriveExpecting(barrier, ExpectedBytes() * begin.num_parts());
    }
    FenceBarrierInit();
  }

  __device__ void HandIn(const Accumulators<kBatchBlocks>& acc) {
    while (handed_in_ - taken_ >= args_.join_lag) Take();
    Send(slots_ + in_slot_ * JoinSlotBytes(), barriers_ + 8 * in_slot_, acc);
    ++handed_in_;
    in_slot_ = in_slot_ + 1 == args_.join_slots ? 0 : in_slot_ + 1;
  }
  // `cut`: any of the strip; `part`: see RunBegin.
  __device__ void SendPart(const RunBegin& cut, int part, const Accumulators<kBatchBlocks>& acc) {
    Send(PartSlots(cut) + part * JoinSlotBytes(), part_barriers_ + 8 * cut.shared_strip(), acc);
  }
  __device__ void TakeAll() {
    while (taken_ < handed_in_) Take();
  }
  // Waits for all parts of a strip of the layer that warps share, adds them and writes y.
  __device__ void TakeShared(const RunBegin& cut, int strip) {
    WaitForPhase(part_barriers_ + 8 * cut.shared_strip(), 0);
    AddAndWrite(PartSlots(cut), cut.num_parts(), strip);
  }

 private:
  // `slot` and `local_barrier`: where they are in every block; it goes to the channels' owners.
  __device__ void Send(const uint8_t* slot, uint32_t local_barrier,
                       const Accumulators<kBatchBlocks>& acc) {
    const uint32_t vector_bytes = args_.join_groups * 64;
    const uint32_t local =
        SharedAddress(slot) + rank_ * kVectors * vector_bytes + owner_g_ * 64 + (lane_ & 3) * 16;
    const uint32_t address = ClusterAddress(local, owner_);
    const uint32_t barrier = ClusterAddress(local_barrier, owner_);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      StoreClusterAsync16(address + i * vector_bytes,
                          ToFloat4(acc[i / kBatchBlocks][i % kBatchBlocks]), barrier);
    }
  }
  // Adds the ranks' sums of this rank's channels in `num_slots` slots that follow each other, and
  // writes y. Lanes share the vectors: two channels of two rows each.
  __device__ void AddAndWrite(const uint8_t* slots, int num_slots, int strip) const {
    const int pitch = static_cast<int>(args_.join_groups) * 4;
    const int num_sums = num_slots * args_.num_ranks;
#pragma unroll 1
    for (int i = lane_; i < num_g_ * kVectors * 4; i += 32) {
      const int t = i & 3;
      const int vector = i / 4 % kVectors;
      const int g = i / (4 * kVectors);
      const float4* from = reinterpret_cast<const float4*>(slots) + vector * pitch + g * 4 + t;
      float sum[4] = {};
#pragma unroll 8
      for (int k = 0; k < num_sums; ++k) AddTo(sum, from[k * kVectors * pitch]);
      WriteVector(strip, vector, first_g_ + g, t, sum);
    }
  }
  __device__ void WriteVector(int strip, int vector, int g, int t, const float (&sum)[4]) const {
    const int n = strip * kStripN + 4 * g;
    if (n >= args_.n) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = vector % kBatchBlocks * kRowsPerBatchBlock + 2 * t + j;
      if (row >= args_.m) continue;
      *reinterpret_cast<__nv_bfloat162*>(args_.y + row * args_.y_stride + n +
                                         vector / kBatchBlocks * 2) =
          __floats2bfloat162_rn(sum[j], sum[j + 2]);
    }
  }
  // Waits for the parts of the oldest strip handed in, adds them and writes y.
  __device__ void Take() {
    WaitForPhase(barriers_ + 8 * out_slot_, out_parity_);
    AddAndWrite(slots_ + out_slot_ * JoinSlotBytes(), 1, next_strip_ + taken_);
    __syncwarp();
    if (lane_ == 0) ArriveExpecting(barriers_ + 8 * out_slot_, ExpectedBytes());
    ++taken_;
    if (++out_slot_ == args_.join_slots) {
      out_slot_ = 0;
      out_parity_ ^= 1;
    }
  }

  __device__ uint32_t JoinSlotBytes() const {
    return args_.num_ranks * kVectors * args_.join_groups * 64;
  }
  __device__ uint8_t* PartSlots(const RunBegin& cut) const {
    return part_slots_ + cut.shared_strip() * args_.join_parts * JoinSlotBytes();
  }
  __device__ uint32_t ExpectedBytes() const { return args_.num_ranks * kVectors * num_g_ * 64; }

  const KernelArgs& args_;
  uint8_t* slots_;
  uint8_t* part_slots_;
  uint32_t barriers_;
  uint32_t part_barriers_;
  int rank_;
  int lane_;
  int first_g_;  // of this rank's channels
  int num_g_;
  int owner_;    // of this lane's channels
  int owner_g_;  // where they are among the owner's
  int next_strip_;
  int handed_in_ = 0;
  int taken_ = 0;
  int in_slot_ = 0;
  int out_slot_ = 0;
  uint32_t out_parity_ = 0;
};

// Where the ranks are no cluster, in the place of RankExchange.
struct NoExchange {
  template <typename... Args>
  __device__ explicit NoExchange(const Args&... /*args*/) {}
};

// Orders this thread's reads and writes for the whole GPU; with the counter's atomic it makes
// parts visible to whoever counts last.
__device__ __forceinline__ void FenceGpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

template <int kBatchBlocks>
__device__ void HandInToWorkspace(const KernelArgs& args, int rank, int strip, int lane,
                                  const Accumulators<kBatchBlocks>& acc) {
  constexpr int kVectors = kBlocksPerStrip * kBatchBlocks;
  float4* parts = reinterpret_cast<float4*>(args.workspace) +
                  static_cast<int64_t>(strip) * args.num_ranks * kVectors * 32 + lane;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    __stcg(parts + (rank * kVectors + i) * 32, ToFloat4(acc[i / kBatchBlocks][i % kBatchBlocks]));
  }
  FenceGpu();
  __syncwarp();
  bool last = false;
  if (lane == 0) {
    last = atomicAdd(args.counters + strip, 1u) == static_cast<uint32_t>(args.num_ranks) - 1;
    if (last) args.counters[strip] = 0;
  }
  if (!__shfl_sync(0xffffffffu, last, 0)) return;
  FenceGpu();
  Accumulators<kBatchBlocks> sum;
  Clear<kBatchBlocks>(sum);
#pragma unroll 2
  for (int r = 0; r < args.num_ranks; ++r) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      AddTo(sum[i / kBatchBlocks][i % kBatchBlocks], __ldcg(parts + (r * kVectors + i) * 32));
    }
  }
  WriteOutputs<kBatchBlocks>(args, strip, lane >> 2, lane & 3, sum);
}

// Hands in the block's sum of a strip, where ranks are not a cluster.
template <int kBatchBlocks>
__device__ __forceinline__ void HandIn(const KernelArgs& args, const BlockShare& share,
                                       int local_strip, int lane,
                                       const Accumulators<kBatchBlocks>& acc) {
  const int strip = share.strip_begin + local_strip;
  if (args.num_ranks == 1) {
    WriteOutputs<kBatchBlocks>(args, strip, lane >> 2, lane & 3, acc);
  } else {
    HandInToWorkspace<kBatchBlocks>(args, share.rank, strip, lane, acc);
  }
}

// Behind a block barrier: adds the warps' parts of the shared strip whose first cut is this warp's
// begin, if there is one.
template <int kBatchBlocks>
__device__ void CombineWarps(const KernelArgs& args, const BlockShare& share, const RunBegin& begin,
                             uint8_t* shared, int warp, int lane) {
  if (!begin.first_cut()) return;
  RunBegin run = share.runs[warp - 1];
  const int strip_begin = begin.strip() * share.num_units;
  const int strip_end = strip_begin + share.num_units;
  Accumulators<kBatchBlocks> sum;
  Clear<kBatchBlocks>(sum);
#pragma unroll 1
  for (int w = warp - 1; run.unit < strip_end && w < args.num_warps; ++w) {
    const RunBegin next = share.runs[w + 1];
    if (max(run.unit, strip_begin) < min(next.unit, strip_end)) {
      const uint32_t offset = next.unit > strip_end
                                  ? args.shared.first_slots_offset + w * SlotBytes(kBatchBlocks)
                                  : args.shared.ring_offset + w * args.stages * args.stage_bytes;
      const float4* slot = reinterpret_cast<const float4*>(shared + offset) + lane;
#pragma unroll
      for (int i = 0; i < kBlocksPerStrip * kBatchBlocks; ++i) {
        AddTo(sum[i / kBatchBlocks][i % kBatchBlocks], slot[i * 32]);
      }
    }
    run = next;
  }
  HandIn<kBatchBlocks>(args, share, begin.strip(), lane, sum);
}

}  // namespace flashquant::cuda
