// Tests of what the kernel's joins rely on: shared memory for every part that a warp leaves, slots
// for every strip that it may be waiting for. Who does what is found here by going through all
// strips, not by the kernel's arithmetic.
#include "kernels/cuda/linear_w4a16/shared_layout.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "gtest/gtest.h"

namespace flashquant::cuda {
namespace {

PackedLayout Layout(int num_strips, int num_units) {
  PackedLayout layout;
  layout.n = num_strips * kStripN;
  layout.k = num_units * kUnitK;
  layout.num_strips = num_strips;
  layout.num_units = num_units;
  layout.unit_dense_bytes = kUnitChunks * ChunkDenseBytes(1, false);
  return layout;
}

// Of a block with so many strips, which its warps share evenly.
struct WarpWork {
  int whole = 0;
  bool leaves_first = false;  // goes on from a strip that the warp before began
};

WarpWork WorkOf(int strips, int num_warps, int warp) {
  WarpWork work;
  const int begin = strips * warp;  // in 1 / num_warps of a strip
  const int end = begin + strips;
  for (int strip = 0; strip < strips; ++strip) {
    const int from = strip * num_warps;
    const int to = from + num_warps;
    if (from >= begin && to <= end) ++work.whole;
    if (from < begin && begin < to && end > to) work.leaves_first = true;
  }
  return work;
}

template <typename Body>
void ForEachPlan(Body&& body) {
  for (const int num_strips : {1, 2, 3, 7, 24, 48, 97, 128, 192, 300, 896}) {
    for (const int num_splits : {1, 2, 5, 16, 32, 33, 66, 132}) {
      if (num_splits > num_strips) continue;
      for (int num_warps = 1; num_warps <= kMaxWarpsPerBlock; ++num_warps) {
        LinearPlan plan;
        plan.num_splits = num_splits;
        plan.num_ranks = 4;
        plan.num_warps = num_warps;
        plan.cluster_join = true;
        SCOPED_TRACE(std::to_string(num_strips) + " strips, " + std::to_string(num_splits) +
                     " splits, " + std::to_string(num_warps) + " warps");
        body(Layout(num_strips, 16), plan);
      }
    }
  }
}

TEST(SharedLayoutTest, EveryWholeStripHasAJoinSlotOrWarpsWaitForHalfOfThem) {
  ForEachPlan([](const PackedLayout& layout, const LinearPlan& plan) {
    const JoinSlots slots = ChooseJoinSlots(layout, plan);
    ASSERT_LE(slots.count, kMaxJoinSlots);
    if (slots.lag > 0 && slots.count == 2 * slots.lag) return;
    ASSERT_EQ(slots.count, slots.lag);
    const EvenSplit strips(layout.num_strips, plan.num_splits);
    for (int split = 0; split < plan.num_splits; ++split) {
      for (int warp = 0; warp < plan.num_warps; ++warp) {
        EXPECT_LE(WorkOf(strips.Size(split), plan.num_warps, warp).whole, slots.count);
      }
    }
  });
}

TEST(SharedLayoutTest, EveryPartOfASharedStripHasAPlace) {
  ForEachPlan([](const PackedLayout& layout, const LinearPlan& plan) {
    const JoinSlots slots = ChooseJoinSlots(layout, plan);
    const EvenSplit strips(layout.num_strips, plan.num_splits);
    for (int split = 0; split < plan.num_splits; ++split) {
      const int size = strips.Size(split);
      int shared = 0;
      for (int strip = 0; strip < size; ++strip) {
        int parts = 0;
        for (int warp = 0; warp < plan.num_warps; ++warp) {
          const bool ends_before = size * (warp + 1) <= strip * plan.num_warps;
          const bool begins_behind = size * warp >= (strip + 1) * plan.num_warps;
          if (!ends_before && !begins_behind) ++parts;
        }
        if (parts > 1) ++shared;
        EXPECT_TRUE(parts == 1 || parts <= slots.parts);
      }
      EXPECT_LE(shared, slots.shared_strips);
    }
    const auto places = static_cast<uint32_t>(slots.parts * slots.shared_strips);
    for (const int batch_blocks : {1, 2, 4}) {
      const SharedLayout layout_of = LayOutShared(layout, plan, batch_blocks);
      EXPECT_GE(layout_of.ring_offset - layout_of.part_slots_offset,
                places * static_cast<uint32_t>(plan.num_ranks) * JoinGroups(plan.num_ranks) *
                    (SlotBytes(batch_blocks) / 8));
    }
  });
}

TEST(SharedLayoutTest, WarpsThatGoOnFromASharedStripHaveASlotForIt) {
  ForEachPlan([](const PackedLayout& layout, LinearPlan plan) {
    plan.cluster_join = false;
    const EvenSplit strips(layout.num_strips, plan.num_splits);
    bool needed = false;
    for (int split = 0; split < plan.num_splits; ++split) {
      for (int warp = 0; warp < plan.num_warps; ++warp) {
        needed |= WorkOf(strips.Size(split), plan.num_warps, warp).leaves_first;
      }
    }
    if (!needed) return;
    for (const int batch_blocks : {1, 2, 4}) {
      const SharedLayout shared = LayOutShared(layout, plan, batch_blocks);
      EXPECT_GE(shared.join_slots_offset - shared.first_slots_offset,
                static_cast<uint32_t>(plan.num_warps) * SlotBytes(batch_blocks));
    }
  });
}

TEST(SharedLayoutTest, JoinSlotsHoldEveryRanksPartOfWhatARankOwns) {
  for (int ranks = 2; ranks <= kMaxClusterRanks; ++ranks) {
    // Groups of four channels by rank, as lane g * ranks / 8 owns them.
    int most = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      int owned = 0;
      for (int g = 0; g < 8; ++g) owned += g * ranks / 8 == rank ? 1 : 0;
      EXPECT_GE(owned, 1) << ranks;
      most = std::max(most, owned);
    }
    EXPECT_EQ(JoinGroups(ranks), static_cast<uint32_t>(most)) << ranks;
  }
}

// A pass of fewer rows runs with the plan for more.
TEST(SharedLayoutTest, FewerRowsNeedNoMoreSharedMemory) {
  ForEachPlan([](const PackedLayout& plain, const LinearPlan& plan) {
    for (const int groups : {1, 2, 4}) {
      for (const bool zeros : {false, true}) {
        for (const int outlier_bytes : {0, 512}) {
          PackedLayout layout = plain;
          layout.groups_per_chunk = groups;
          layout.has_zeros = zeros;
          layout.max_outlier_bytes = outlier_bytes;
          const uint32_t rows8 = LayOutShared(layout, plan, 1).ring_offset;
          const uint32_t rows16 = LayOutShared(layout, plan, 2).ring_offset;
          ASSERT_LE(rows8, rows16);
          ASSERT_LE(rows16, LayOutShared(layout, plan, 4).ring_offset);
        }
      }
    }
  });
}

}  // namespace
}  // namespace flashquant::cuda
