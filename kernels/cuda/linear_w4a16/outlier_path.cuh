// Outlier records: each outlier is one column of an MMA. Its A fragment has the value at the
// outlier's channel and zeros elsewhere, its x row comes by ldmatrix with the outlier's own
// address, and the product lands in the accumulators of the dense path: no shared sums, no barrier,
// no atomics. Source: design "kernel" 4, strategy 3b, changed as packed_format.h says.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/linear_w4a16/dense_path.cuh"

namespace flashquant::cuda {

// 0xffff in each half where the halves are equal. Both operands hold integers 0..15 per half, which
// as FP16 are distinct subnormals, so that the half-precision comparison can do it in one
// instruction.
__device__ __forceinline__ uint32_t EqualHalvesMask(uint32_t a, uint32_t b) {
  __half2 x;
  __half2 y;
  memcpy(&x, &a, sizeof(x));
  memcpy(&y, &b, sizeof(y));
  return __heq2_mask(x, y);
}

// The A register of a pair of slots for the lanes of channel g: their values where the channel is
// g.
__device__ __forceinline__ uint32_t ExpandSlots(const uint2& slots, uint32_t g_pair) {
  return slots.y & EqualHalvesMask(slots.x & 0x000f000f, g_pair);
}

// Where a lane finds its part of a batch of four fragments.
struct OutlierCursor {
  uint32_t positions;  // shared address of the lane's position in the record's first fragment
  uint32_t fragment;   // of a batch, whose x row the lane fetches
  uint32_t last;       // fragment of the record
  uint32_t pairs;      // shared address of the pair of slots that the lane expands
  uint32_t x;          // shared address of the window in batch block 0
  uint32_t g_pair;     // the lane's channel, twice
};

// x rows of a batch of four fragments as B fragments; behind the record's last one, that one again.
template <int kBatchBlocks>
__device__ __forceinline__ void FetchRows(const KernelArgs& args, const OutlierCursor& cursor,
                                          uint32_t fragment, uint32_t (&b)[kBatchBlocks][4]) {
  constexpr uint32_t kFeatureMask = kWindowChunks * kXChunkBytes - 16;
  const uint32_t own = min(fragment + cursor.fragment, cursor.last);
  const uint32_t row =
      cursor.x + (LoadShared2(cursor.positions + own * kFragmentBytes) & kFeatureMask);
#pragma unroll
  for (int nb = 0; nb < kBatchBlocks; ++nb) {
    LdMatrixX4Trans(b[nb], row + nb * args.x_block_pitch);
  }
}

// Adds a batch of four fragments, or with kFull false the first `left` (1 to 3) of them. b holds
// their rows.
template <int kBatchBlocks, int kOctet, bool kFull>
__device__ __forceinline__ void AddBatch(const OutlierCursor& cursor, uint32_t fragment,
                                         uint32_t left, const uint32_t (&b)[kBatchBlocks][4],
                                         float (&acc)[kBatchBlocks][4]) {
  constexpr int kRow = kOctet % 2;  // channels g or g + 8 of the block
  const uint32_t base = cursor.pairs + fragment * kFragmentBytes;
  uint32_t a[2][4] = {};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint2 slots = LoadShared8(base + i * kFragmentBytes);
    const uint32_t expanded = ExpandSlots(slots, cursor.g_pair);
    a[i / 2][kRow + i % 2 * 2] = kFull || i == 0 || i < left ? expanded : 0;
  }
#pragma unroll
  for (int nb = 0; nb < kBatchBlocks; ++nb) {
    MmaBf16(acc[nb], a[0], b[nb][0], b[nb][1], acc[nb]);
    MmaBf16(acc[nb], a[1], b[nb][2], b[nb][3], acc[nb]);
  }
}

// One octet's fragments fragment .. end - 1; b holds the rows of the first batch, and on return
// those of the batch at `end`.
template <int kBatchBlocks, int kOctet>
__device__ __forceinline__ void AddOctet(const KernelArgs& args, const OutlierCursor& cursor,
                                         uint32_t& fragment, uint32_t end,
                                         uint32_t (&b)[kBatchBlocks][4],
                                         float (&acc)[kBatchBlocks][4]) {
  // Hides from the compiler that `end` is a byte: it would unroll all 64 batches.
  asm volatile("" : "+r"(end));
#pragma unroll 1
  for (; fragment + 4 <= end; fragment += 4) {
    uint32_t next[kBatchBlocks][4];
    FetchRows<kBatchBlocks>(args, cursor, fragment + 4, next);
    AddBatch<kBatchBlocks, kOctet, true>(cursor, fragment, 4, b, acc);
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[nb][i] = next[nb][i];
    }
  }
  if (fragment < end) {
    AddBatch<kBatchBlocks, kOctet, false>(cursor, fragment, end - fragment, b, acc);
    fragment = end;
    FetchRows<kBatchBlocks>(args, cursor, fragment, b);
  }
}

// Adds the outlier record at shared address `record` to `acc`. `x`: shared address of the window's
// first chunk in batch block 0.
template <int kBatchBlocks>
__device__ __forceinline__ void AddOutliers(const KernelArgs& args, uint32_t record, uint32_t x,
                                            int lane, Accumulators<kBatchBlocks>& acc) {
  const uint32_t ends = LoadShared4(record);
  const uint32_t fragments = record + kOutlierHeaderBytes;
  OutlierCursor cursor;
  cursor.positions = fragments + ((lane & 7) >> 1) * 8 + (lane & 1) * 2;
  cursor.fragment = lane >> 3;
  cursor.last = (ends >> 24) - 1;
  cursor.pairs = fragments + (lane & 3) * 8;
  cursor.x = x;
  cursor.g_pair = (lane >> 2) * 0x00010001u;
  uint32_t b[kBatchBlocks][4];
  uint32_t fragment = 0;
  FetchRows<kBatchBlocks>(args, cursor, fragment, b);
  AddOctet<kBatchBlocks, 0>(args, cursor, fragment, ends & 0xff, b, acc[0]);
  AddOctet<kBatchBlocks, 1>(args, cursor, fragment, ends >> 8 & 0xff, b, acc[0]);
  AddOctet<kBatchBlocks, 2>(args, cursor, fragment, ends >> 16 & 0xff, b, acc[1]);
  AddOctet<kBatchBlocks, 3>(args, cursor, fragment, ends >> 24, b, acc[1]);
}

}  // namespace flashquant::cuda
