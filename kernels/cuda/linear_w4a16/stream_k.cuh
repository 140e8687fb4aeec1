// Joining partial sums, always in the same order, so that results do not depend on timing.
//   A warp that has all of a row (a strip within a K slice) finishes it alone. Otherwise it leaves
//   its sums in shared memory: of the row it did not begin in a "first" slot, of its last row in
//   its own ring, which is free by then. After the block's only barrier these are added in warp
//   order.
//   The sum over a block is a piece. A strip of one piece goes straight to y; otherwise pieces go
//   to the workspace and whoever arrives last adds all of them in index order. Nobody ever waits.
// Work is counted per block of 16 channels, so that several warps share one row's end.
#pragma once

#include "kernels/cuda/linear_w4a16/dense_path.cuh"

namespace flashquant::cuda {

__device__ __forceinline__ float4 ToFloat4(const float (&v)[4]) {
  return make_float4(v[0], v[1], v[2], v[3]);
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

// Adds all pieces of one block of a strip in index order and writes y.
template <int kBatchBlocks>
__device__ void ReducePieces(const KernelArgs& args, const RowInfo& info, int strip, int block,
                             int lane) {
  float sum[kBatchBlocks][4] = {};
  const float4* pieces =
      reinterpret_cast<const float4*>(args.workspace) +
      static_cast<int64_t>(info.strip_piece) * kBlocksPerStrip * kBatchBlocks * 32 +
      block * kBatchBlocks * 32 + lane;
#pragma unroll 4
  for (uint32_t i = 0; i < info.strip_pieces; ++i) {
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
      const float4 v =
          __ldcg(pieces + (static_cast<int64_t>(i) * kBlocksPerStrip * kBatchBlocks + nb) * 32);
      sum[nb][0] += v.x;
      sum[nb][1] += v.y;
      sum[nb][2] += v.z;
      sum[nb][3] += v.w;
    }
  }
  WriteBlock<kBatchBlocks>(args, strip * kStripN + block * 16, lane, sum);
}

// Orders this thread's reads and writes for the whole GPU; with the counter's atomic it makes
// pieces visible to whoever counts last.
__device__ __forceinline__ void FenceGpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Hands in blocks first_block .. first_block + kBlocks - 1 of this thread block's piece of `row`.
template <int kBatchBlocks, int kBlocks>
__device__ void FinishBlocks(const KernelArgs& args, const RowInfo& info, uint32_t row,
                             int first_block, int lane,
                             const float (&acc)[kBlocks][kBatchBlocks][4]) {
  const int strip = static_cast<int>(row % static_cast<uint32_t>(args.num_strips));
  if (info.strip_pieces == 1) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      WriteBlock<kBatchBlocks>(args, strip * kStripN + (first_block + i) * 16, lane, acc[i]);
    }
    return;
  }
  const int64_t piece = info.row_piece + (blockIdx.x - info.first_block);
  float4* out = reinterpret_cast<float4*>(args.workspace) +
                (piece * kBlocksPerStrip + first_block) * kBatchBlocks * 32 + lane;
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
    last = atomicAdd(counter, 1u) == info.strip_pieces - 1;
    if (last) *counter = 0;
  }
  const uint32_t finished = __ballot_sync(0xffffffffu, last);
  if (finished == 0) return;
  FenceGpu();
#pragma unroll 1
  for (int i = 0; i < kBlocks; ++i) {
    if ((finished >> i & 1u) != 0)
      ReducePieces<kBatchBlocks>(args, info, strip, first_block + i, lane);
  }
}

// Rows left in shared memory: slot 2w is warp w's first row, slot 2w + 1 its last one.
struct SlotTable {
  RowInfo info[2 * kMaxWarpsPerBlock];
  uint32_t row[2 * kMaxWarpsPerBlock];     // kNoRow: unused
  uint32_t offset[2 * kMaxWarpsPerBlock];  // in shared memory
};
static_assert(sizeof(SlotTable) == kSharedSlotTableBytes && kMaxWarpsPerBlock == 16);
inline constexpr uint32_t kNoRow = 0xffffffffu;

// After the barrier: adds the slots of each row in warp order and hands the pieces in.
template <int kBatchBlocks>
__device__ void CombineSlots(const KernelArgs& args, uint8_t* shared, const SlotTable& table,
                             int warp, int lane) {
  const uint32_t row = table.row[lane];
  const uint32_t same = __match_any_sync(0xffffffffu, row);
  const bool leads = row != kNoRow && (same & ((1u << lane) - 1)) == 0;
  const uint32_t leaders = __ballot_sync(0xffffffffu, leads);
  const int num_items = __popc(leaders) * kBlocksPerStrip;
#pragma unroll 1
  for (int item = warp; item < num_items; item += args.num_warps) {
    uint32_t from = leaders;
    for (int i = item / kBlocksPerStrip; i > 0; --i) from &= from - 1;
    const int leader = __ffs(static_cast<int>(from)) - 1;
    const int block = item % kBlocksPerStrip;
    const uint32_t members = __shfl_sync(0xffffffffu, same, leader);
    float sum[1][kBatchBlocks][4] = {};
    for (uint32_t rest = members; rest != 0; rest &= rest - 1) {
      const float4* slot = reinterpret_cast<const float4*>(
                               shared + table.offset[__ffs(static_cast<int>(rest)) - 1]) +
                           block * kBatchBlocks * 32 + lane;
#pragma unroll
      for (int nb = 0; nb < kBatchBlocks; ++nb) {
        const float4 v = slot[nb * 32];
        sum[0][nb][0] += v.x;
        sum[0][nb][1] += v.y;
        sum[0][nb][2] += v.z;
        sum[0][nb][3] += v.w;
      }
    }
    FinishBlocks<kBatchBlocks, 1>(args, table.info[leader], table.row[leader], block, lane, sum);
  }
}

}  // namespace flashquant::cuda
