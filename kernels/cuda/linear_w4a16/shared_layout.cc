// See shared_layout.h.
#include "kernels/cuda/linear_w4a16/shared_layout.h"

#include <algorithm>

#include "kernels/base/math_util.h"
#include "kernels/cuda/linear_w4a16/run_table.h"
#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {
namespace {

// Whether any warp of any block leaves a strip that it did not begin and goes on to the next.
bool NeedsFirstSlots(const PackedLayout& layout, const LinearPlan& plan) {
  for (int extra = 0; extra < 2; ++extra) {
    const int strips = layout.num_strips / plan.num_splits + extra;
    for (int w = 1; w < plan.num_warps; ++w) {
      const bool cut = strips * w % plan.num_warps != 0;
      if (cut && strips * (w + 1) > (strips * w / plan.num_warps + 1) * plan.num_warps) return true;
    }
  }
  return false;
}

}  // namespace

uint32_t StageBytes(const PackedLayout& layout) {
  return RoundUp(static_cast<uint32_t>(layout.unit_dense_bytes +
                                       std::min(layout.max_outlier_bytes, kMaxPieceBytes)),
                 uint32_t{kCopyAlignment});
}

JoinSlots ChooseJoinSlots(const PackedLayout& layout, const LinearPlan& plan) {
  JoinSlots slots;
  for (int extra = 0; extra < 2; ++extra) {
    const int strips = layout.num_strips / plan.num_splits + extra;
    if (extra == 1 && layout.num_strips % plan.num_splits == 0) break;
    slots.count = std::max(slots.count, strips / plan.num_warps);
    const RunTable runs = CutRuns(strips, 1, plan.num_warps);
    for (int w = 0; w < plan.num_warps; ++w) {
      if (!runs.begin[w].cut()) continue;
      slots.shared_strips = std::max(slots.shared_strips, runs.begin[w].shared_strip() + 1);
      slots.parts = std::max(slots.parts, runs.begin[w].num_parts());
    }
  }
  // More slots would cost the ring more than waiting for the other ranks costs.
  slots.lag = slots.count;
  if (slots.count > kMaxJoinSlots) {
    slots.count = 2;
    slots.lag = 1;
  }
  return slots;
}

SharedLayout LayOutShared(const PackedLayout& layout, const LinearPlan& plan, int batch_blocks) {
  const auto blocks = static_cast<uint32_t>(batch_blocks);
  const auto ranks = static_cast<uint32_t>(plan.num_ranks);
  const uint32_t units = (static_cast<uint32_t>(layout.num_units) + ranks - 1) / ranks;
  const uint32_t chunks = units * kUnitChunks;
  SharedLayout out;
  out.starts_offset = kSharedHeadBytes;
  out.x_offset = RoundUp(out.starts_offset + chunks * blocks * kStartBytes *
                                                 static_cast<uint32_t>(layout.groups_per_chunk),
                         uint32_t{kCopyAlignment});
  out.x_block_pitch = chunks * kChunkK * kRowsPerBatchBlock * 2;
  out.first_slots_offset = out.x_offset + blocks * out.x_block_pitch;
  out.join_slots_offset = out.first_slots_offset;
  if (!plan.cluster_join && NeedsFirstSlots(layout, plan)) {
    out.join_slots_offset += static_cast<uint32_t>(plan.num_warps) * SlotBytes(batch_blocks);
  }
  out.part_slots_offset = out.join_slots_offset;
  out.ring_offset = out.join_slots_offset;
  if (plan.cluster_join) {
    const JoinSlots slots = ChooseJoinSlots(layout, plan);
    const uint32_t slot_bytes = ranks * JoinGroups(plan.num_ranks) * (SlotBytes(batch_blocks) / 8);
    out.part_slots_offset += static_cast<uint32_t>(plan.num_warps * slots.count) * slot_bytes;
    out.ring_offset = out.part_slots_offset +
                      static_cast<uint32_t>(slots.shared_strips * slots.parts) * slot_bytes;
  }
  out.ring_offset = RoundUp(out.ring_offset, uint32_t{kCopyAlignment});
  return out;
}

}  // namespace flashquant::cuda
