// Where things are in a block's shared memory: the same arithmetic for the planner and the
// launcher.
#pragma once

#include <cstdint>

#include "kernels/cuda/linear_w4a16/packed_format.h"
#include "kernels/cuda/linear_w4a16/plan.h"
#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {

inline constexpr int kMaxStages = 6;
inline constexpr int kMaxJoinSlots = 4;
// The barriers of each warp's ring (StageRing), then barriers on which the other ranks' parts
// complete, one for each of a warp's join slots and for each strip that warps share.
inline constexpr uint32_t kRingBarrierBytes = (kMaxStages + 1) * 8;
inline constexpr uint32_t kJoinBarrierOffset = kMaxWarpsPerBlock * kRingBarrierBytes;
inline constexpr uint32_t kPartBarrierOffset =
    kJoinBarrierOffset + kMaxWarpsPerBlock * kMaxJoinSlots * 8;
inline constexpr uint32_t kSharedHeadBytes = kPartBarrierOffset + kMaxWarpsPerBlock * 8;
static_assert(kSharedHeadBytes % 16 == 0);

constexpr int BatchBlocks(int m) { return m <= 8 ? 1 : m <= 16 ? 2 : 4; }

// x is staged times this power of two (dense.cuh).
inline constexpr int kXExponent = kOutlierExponent;

// Of a group and batch block: what the sums of each block's codes begin with, FP32 [block][4 lanes
// of a row][4 sums of a lane].
inline constexpr uint32_t kStartBytes = kBlocksPerStrip * 4 * 16;

// Partial sums of one strip in FP32.
FQ_HOST_DEVICE constexpr uint32_t SlotBytes(int batch_blocks) {
  return kBlocksPerStrip * 512 * static_cast<uint32_t>(batch_blocks);
}

// Of the eight groups of four channels of a strip, how many a rank of a cluster owns at most.
constexpr uint32_t JoinGroups(int ranks) {
  return (8 + static_cast<uint32_t>(ranks) - 1) / static_cast<uint32_t>(ranks);
}

// Bytes from the start of shared memory; barriers come first.
struct SharedLayout {
  uint32_t ring_offset = 0;         // the last part, at a multiple of kCopyAlignment
  uint32_t starts_offset = 0;       // [chunk][group][batch block]: kStartBytes
  uint32_t x_offset = 0;            // BF16 [batch block][chunk][128][8]
  uint32_t x_block_pitch = 0;       // bytes of one batch block
  uint32_t first_slots_offset = 0;  // one slot per warp, or none, see join.cuh
  uint32_t join_slots_offset = 0;   // with cluster_join, see RankExchange
  uint32_t part_slots_offset = 0;   // the same
};

// A stage: a unit's dense bytes and the first piece of its outliers.
uint32_t StageBytes(const PackedLayout& layout);

// How many slots a warp has for all ranks' sums of its whole strips, and for how many strips it may
// be waiting; how many strips of a block warps share at most, and how many warps one of them.
struct JoinSlots {
  int count = 0;
  int lag = 0;
  int shared_strips = 0;
  int parts = 0;
};
JoinSlots ChooseJoinSlots(const PackedLayout& layout, const LinearPlan& plan);

SharedLayout LayOutShared(const PackedLayout& layout, const LinearPlan& plan, int batch_blocks);

}  // namespace flashquant::cuda
