// See shared_layout.h.
#include "kernels/cuda/linear_w4a16/shared_layout.h"

#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {
namespace {

// Whether any warp of any block leaves a strip that it did not begin and goes on to the next.
bool NeedsFirstSlots(const PackedLayout& layout, const LinearPlan& plan) {
  for (int extra = 0; extra < 2; ++extra) {
    const int strips = layout.num_strips / plan.num_splits + extra;
    for (int more = 0; more < 2; ++more) {
      const int units = layout.num_units / plan.num_ranks + more;
      for (int w = 1; w < plan.num_warps && units > 0; ++w) {
        const EvenSplit runs(strips * units, plan.num_warps);
        const int begin = runs.Begin(w);
        const int end = runs.Begin(w + 1);
        if (begin % units != 0 && end > (begin / units + 1) * units) return true;
      }
    }
  }
  return false;
}

}  // namespace

SharedLayout LayOutShared(const PackedLayout& layout, const LinearPlan& plan, int batch_blocks) {
  const auto blocks = static_cast<uint32_t>(batch_blocks);
  const auto ranks = static_cast<uint32_t>(plan.num_ranks);
  const auto splits = static_cast<uint32_t>(plan.num_splits);
  const uint32_t units = (static_cast<uint32_t>(layout.num_units) + ranks - 1) / ranks;
  const uint32_t strips = (static_cast<uint32_t>(layout.num_strips) + splits - 1) / splits;
  const uint32_t chunks = units * kUnitChunks;
  SharedLayout out;
  const uint32_t row_values = chunks * blocks * kRowsPerBatchBlock;
  const uint32_t x_bytes = row_values * kChunkK * 2;
  const bool digits = UsesDigits(batch_blocks);
  out.sums_offset = kSharedHeadBytes;
  out.scales_offset = out.sums_offset;
  if (!digits || layout.has_zeros) {
    out.scales_offset += row_values * static_cast<uint32_t>(layout.groups_per_chunk) * 4;
  }
  out.digits_offset = RoundUp(out.scales_offset + (digits ? row_values * 4 : 0), 128);
  out.x_offset = out.digits_offset + (digits ? x_bytes : 0);
  out.x_block_pitch = chunks * kChunkK * kRowsPerBatchBlock * 2;
  out.first_slots_offset = out.x_offset + (!digits || layout.max_outlier_bytes > 0 ? x_bytes : 0);
  out.join_slots_offset = out.first_slots_offset;
  if (NeedsFirstSlots(layout, plan)) {
    out.join_slots_offset += static_cast<uint32_t>(plan.num_warps) * SlotBytes(batch_blocks);
  }
  out.ring_offset = out.join_slots_offset;
  if (plan.cluster_join) {
    out.ring_offset += RoundUp(strips, ranks) * SlotBytes(batch_blocks);
  }
  return out;
}

}  // namespace flashquant::cuda
