// Joining partial sums, always in the same order, so that results do not depend on timing.
//   A warp that has all of a strip's units in its block hands their sum in alone. Otherwise it
//   leaves its part in shared memory: of the strip it did not begin in a "first" slot, of its last
//   strip in its own ring, which is free by then. Behind a block barrier these are added in warp
//   order and handed in.
//   Handing in, with several ranks: to the shared memory of the rank that owns the strip, which
//   waits for all ranks' parts at its end and adds them; or, without clusters, to the workspace,
//   where whoever arrives last adds all parts in rank order. Nobody ever waits there.
// Work is counted per block of 16 channels, so that several warps share one strip's end.
#pragma once

#include "kernels/cuda/linear_w4a16/dense_common.cuh"
#include "kernels/cuda/primitives/cluster.cuh"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

// What a thread block computes (kernel_args.h). Its units, strip by strip, are its local units.
struct BlockShare {
  int rank;
  int strip_begin;
  int num_strips;
  int unit_begin;  // of a strip: the block's part of K
  int num_units;   // of a strip
  EvenSplit runs;  // of the local units over warps
  FastDivisor by_units;

  __device__ BlockShare(const KernelArgs& args) : rank(static_cast<int>(blockIdx.x)) {
    const int split = static_cast<int>(blockIdx.y);
    strip_begin = args.strips.Begin(split);
    num_strips = args.strips.Size(split);
    unit_begin = args.units.Begin(rank);
    num_units = args.units.Size(rank);
    by_units = args.by_units[rank < args.units.remainder ? 1 : 0];
    const int total = num_strips * num_units;
    runs.quotient = args.by_warps.Divide(total);
    runs.remainder = total - runs.quotient * args.num_warps;
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
__device__ void StoreSlot(uint8_t* slot, int lane, const Accumulators<kBatchBlocks>& acc) {
  float4* out = reinterpret_cast<float4*>(slot) + lane;
#pragma unroll
  for (int block = 0; block < kBlocksPerStrip; ++block) {
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
      out[(block * kBatchBlocks + nb) * 32] = ToFloat4(acc[block][nb]);
    }
  }
}

// Writes 16 channels x 8 rows of y. Lanes trade neighbours' channels so that each store is a pair.
template <int kBatchBlocks>
__device__ void WriteBlock(const KernelArgs& args, int channel, int lane,
                           const float (&acc)[kBatchBlocks][4]) {
  const int g = lane >> 2;
  const bool odd = (g & 1) != 0;
#pragma unroll
  for (int nb = 0; nb < kBatchBlocks; ++nb) {
    const int row = nb * kRowsPerBatchBlock + 2 * (lane & 3) + (odd ? 1 : 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float mine = odd ? acc[nb][2 * half + 1] : acc[nb][2 * half];
      const float theirs =
          __shfl_xor_sync(0xffffffffu, odd ? acc[nb][2 * half] : acc[nb][2 * half + 1], 4);
      const int n = channel + 8 * half + (g & ~1);
      if (row < args.m && n < args.n) {
        *reinterpret_cast<__nv_bfloat162*>(args.y + row * args.y_stride + n) =
            odd ? __floats2bfloat162_rn(theirs, mine) : __floats2bfloat162_rn(mine, theirs);
      }
    }
  }
}

// Adds the parts of all ranks of one block of a strip in rank order and writes y.
template <int kBatchBlocks>
__device__ void ReduceWorkspace(const KernelArgs& args, int strip, int block, int lane) {
  float sum[kBatchBlocks][4] = {};
  const float4* parts =
      reinterpret_cast<const float4*>(args.workspace) +
      (static_cast<int64_t>(strip) * args.num_ranks * kBlocksPerStrip + block) * kBatchBlocks * 32 +
      lane;
#pragma unroll 4
  for (int rank = 0; rank < args.num_ranks; ++rank) {
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
      AddTo(sum[nb], __ldcg(parts + (rank * kBlocksPerStrip * kBatchBlocks + nb) * 32));
    }
  }
  WriteBlock<kBatchBlocks>(args, strip * kStripN + block * 16, lane, sum);
}

// Orders this thread's reads and writes for the whole GPU; with the counter's atomic it makes
// parts visible to whoever counts last.
__device__ __forceinline__ void FenceGpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

template <int kBatchBlocks, int kBlocks>
__device__ void HandInToWorkspace(const KernelArgs& args, int rank, int strip, int first_block,
                                  int lane, const float (&acc)[kBlocks][kBatchBlocks][4]) {
  float4* out =
      reinterpret_cast<float4*>(args.workspace) +
      ((static_cast<int64_t>(strip) * args.num_ranks + rank) * kBlocksPerStrip + first_block) *
          kBatchBlocks * 32 +
      lane;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
      __stcg(out + (i * kBatchBlocks + nb) * 32, ToFloat4(acc[i][nb]));
    }
  }
  FenceGpu();
  __syncwarp();
  bool last = false;
  if (lane < kBlocks) {
    uint32_t* counter = args.counters + strip * kBlocksPerStrip + first_block + lane;
    last = atomicAdd(counter, 1u) == static_cast<uint32_t>(args.num_ranks) - 1;
    if (last) *counter = 0;
  }
  const uint32_t finished = __ballot_sync(0xffffffffu, last);
  if (finished == 0) return;
  FenceGpu();
#pragma unroll 1
  for (int i = 0; i < kBlocks; ++i) {
    if ((finished >> i & 1u) != 0)
      ReduceWorkspace<kBatchBlocks>(args, strip, first_block + i, lane);
  }
}

// Hands in blocks first_block .. first_block + kBlocks - 1 of the block's sum of local strip
// `local`.
template <int kBatchBlocks, bool kCluster, int kBlocks>
__device__ void HandIn(const KernelArgs& args, const BlockShare& share, uint8_t* shared, int local,
                       int first_block, int lane, const float (&acc)[kBlocks][kBatchBlocks][4]) {
  const int strip = share.strip_begin + local;
  if (args.num_ranks == 1) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      WriteBlock<kBatchBlocks>(args, strip * kStripN + (first_block + i) * 16, lane, acc[i]);
    }
    return;
  }
  if (!kCluster || !args.cluster_join) {
    HandInToWorkspace<kBatchBlocks, kBlocks>(args, share.rank, strip, first_block, lane, acc);
    return;
  }
  const int round = args.by_ranks.Divide(local);
  const int slot = round * args.num_ranks + share.rank;
  const auto owner = static_cast<uint32_t>(local - round * args.num_ranks);
  const uint32_t address =
      ClusterAddress(SharedAddress(shared + args.shared.join_slots_offset) +
                         static_cast<uint32_t>(slot) * SlotBytes(kBatchBlocks) +
                         static_cast<uint32_t>(first_block) * kBatchBlocks * 512,
                     owner);
  const uint32_t barrier = ClusterAddress(SharedAddress(shared + kJoinBarrierOffset), owner);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
      StoreClusterAsync16(address + (i * kBatchBlocks + nb) * 512 + lane * 16, ToFloat4(acc[i][nb]),
                          barrier);
    }
  }
}

// Behind a block barrier: adds the warps' parts of the strips that more than one warp shares.
template <int kBatchBlocks, bool kCluster>
__device__ void CombineWarps(const KernelArgs& args, const BlockShare& share, uint8_t* shared,
                             int warp, int lane) {
  const uint32_t ring_pitch = args.stages * args.stage_bytes;
#pragma unroll 1
  for (int item = warp; item < (args.num_warps - 1) * kBlocksPerStrip; item += args.num_warps) {
    // A shared strip belongs to the first cut between runs that falls inside it.
    const int cut = item / kBlocksPerStrip + 1;
    const int block = item % kBlocksPerStrip;
    const int unit = share.runs.Begin(cut);
    const int local = share.by_units.Divide(unit);
    const int strip_begin = local * share.num_units;
    const int strip_end = strip_begin + share.num_units;
    if (local == share.num_strips || unit == strip_begin || share.runs.Begin(cut - 1) > strip_begin)
      continue;
    float sum[1][kBatchBlocks][4] = {};
    int w = cut - 1;
    int run_begin = share.runs.Begin(w);
#pragma unroll 1
    while (run_begin < strip_end) {
      const int run_end = run_begin + share.runs.Size(w);
      const uint32_t offset = run_end > strip_end
                                  ? args.shared.first_slots_offset + w * SlotBytes(kBatchBlocks)
                                  : args.shared.ring_offset + w * ring_pitch;
      const float4* slot =
          reinterpret_cast<const float4*>(shared + offset) + block * kBatchBlocks * 32 + lane;
#pragma unroll
      for (int nb = 0; nb < kBatchBlocks; ++nb) AddTo(sum[0][nb], slot[nb * 32]);
      run_begin = run_end;
      ++w;
    }
    HandIn<kBatchBlocks, kCluster, 1>(args, share, shared, local, block, lane, sum);
  }
}

// Strips that this rank owns: every num_ranks-th.
__device__ __forceinline__ int NumOwned(const KernelArgs& args, const BlockShare& share) {
  return args.by_ranks.Divide(share.num_strips - share.rank + args.num_ranks - 1);
}

// Waits for all ranks' parts of the strips that this rank owns and adds them.
template <int kBatchBlocks>
__device__ void CombineRanks(const KernelArgs& args, const BlockShare& share, uint8_t* shared,
                             int warp, int lane) {
  const int owned = NumOwned(args, share);
  if (owned == 0) return;
  WaitForBytes(SharedAddress(shared + kJoinBarrierOffset));
#pragma unroll 1
  for (int item = warp; item < owned * kBlocksPerStrip; item += args.num_warps) {
    const int index = item / kBlocksPerStrip;
    const int block = item % kBlocksPerStrip;
    float sum[kBatchBlocks][4] = {};
    const float4* slots =
        reinterpret_cast<const float4*>(shared + args.shared.join_slots_offset +
                                        static_cast<uint32_t>(index * args.num_ranks) *
                                            SlotBytes(kBatchBlocks)) +
        block * kBatchBlocks * 32 + lane;
#pragma unroll 4
    for (int rank = 0; rank < args.num_ranks; ++rank) {
#pragma unroll
      for (int nb = 0; nb < kBatchBlocks; ++nb) {
        AddTo(sum[nb], slots[(rank * kBlocksPerStrip * kBatchBlocks + nb) * 32]);
      }
    }
    const int strip = share.strip_begin + index * args.num_ranks + share.rank;
    WriteBlock<kBatchBlocks>(args, strip * kStripN + block * 16, lane, sum);
  }
}

}  // namespace flashquant::cuda
