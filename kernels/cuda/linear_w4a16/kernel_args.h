// Arguments of the fused kernel: the launcher's parameters with shared-memory offsets worked out.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

struct KernelArgs {
  const __nv_bfloat16* x;
  __nv_bfloat16* y;
  int64_t x_stride;
  int64_t y_stride;
  int32_t m;  // at most 8 * kBatchBlocks
  int32_t k;
  int32_t n;
  int32_t num_strips;
  int32_t num_warps;
  bool has_zeros;

  const uint8_t* records;
  const Unit* units;
  const WarpPlan* warps;
  const RowInfo* rows;
  float* workspace;
  uint32_t* counters;

  // Shared memory, bytes from its start; barriers and slot tables come first.
  uint32_t sums_offset;         // FP32 [slice chunk][group][batch block][8]: sums of x over a group
  uint32_t x_offset;            // BF16 [batch block][slice chunk][128][8]
  uint32_t x_block_pitch;       // bytes of one batch block
  uint32_t first_slots_offset;  // partial sums, see stream_k.cuh
  uint32_t ring_offset;
  uint32_t stage_bytes;
  int32_t stages;
  int32_t early_stages;  // filled before the activations are staged
};

// More than 16 rows need more than 128 registers a thread.
constexpr int MaxWarps(int batch_blocks) { return batch_blocks <= 2 ? kMaxWarpsPerBlock : 8; }

// Partial sums of one row in FP32.
template <int kBatchBlocks>
inline constexpr uint32_t kSlotBytes = kBlocksPerStrip* kBatchBlocks * 512;

// Behind each stage: the outlier path reads a batch of four fragments whole.
inline constexpr uint32_t kStageTailBytes = 4 * kFragmentBytes;

inline constexpr uint32_t kSharedBarrierBytes = kMaxWarpsPerBlock * 4 * 8;  // kMaxStages = 4
inline constexpr uint32_t kSharedSlotTableBytes = 2 * kMaxWarpsPerBlock * 24;
inline constexpr uint32_t kSharedHeadBytes = kSharedBarrierBytes + kSharedSlotTableBytes;
static_assert(kSharedHeadBytes % 16 == 0);

}  // namespace flashquant::cuda
