// Tests of how a block's units are cut into runs: nothing is lost or done twice, and warps know
// which strips they share, whatever part of K the block has.
#include "kernels/cuda/linear_w4a16/run_table.h"

#include "gtest/gtest.h"

namespace flashquant::cuda {
namespace {

template <typename Check>
void ForAllBlocks(Check&& check) {
  for (int strips = 1; strips <= 40; ++strips) {
    for (int units = 1; units <= 20; ++units) {
      for (int warps = 1; warps <= kMaxWarpsPerBlock; ++warps) {
        SCOPED_TRACE(testing::Message()
                     << strips << " strips of " << units << " units, " << warps << " warps");
        check(strips, units, warps, CutRuns(strips, units, warps));
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(RunTableTest, RunsFollowEachOtherThroughAllUnitsAndDifferByAUnitAtMost) {
  ForAllBlocks([](int strips, int units, int warps, const RunTable& runs) {
    ASSERT_EQ(runs.begin[0].unit, 0);
    ASSERT_EQ(runs.begin[warps].unit, strips * units);
    ASSERT_EQ(runs.begin[warps].strip(), strips);
    ASSERT_FALSE(runs.begin[warps].cut());
    for (int w = 0; w < warps; ++w) {
      const int size = runs.begin[w + 1].unit - runs.begin[w].unit;
      ASSERT_GE(size, strips * units / warps);
      ASSERT_LE(size, strips * units / warps + 1);
      ASSERT_EQ(runs.begin[w].strip(), runs.begin[w].unit / units);
    }
  });
}

// A strip is whole if its 1 / num_warps parts are all one warp's.
TEST(RunTableTest, AStripThatWarpsShareHasOneFirstCutAndIsTheSameForEveryNumberOfUnits) {
  ForAllBlocks([](int strips, int /*units*/, int warps, const RunTable& runs) {
    for (int strip = 0; strip < strips; ++strip) {
      int cuts = 0;
      int first_cuts = 0;
      for (int w = 0; w < warps; ++w) {
        const int place = strips * w - strip * warps;  // of the run's begin, in such parts
        const bool inside = place > 0 && place < warps;
        if (inside) {
          ASSERT_EQ(runs.begin[w].strip(), strip) << w;
        }
        if (runs.begin[w].strip() != strip) continue;
        ASSERT_EQ(runs.begin[w].cut(), inside) << w;
        ASSERT_EQ(runs.begin[w].first_cut(), inside && cuts == 0) << w;
        cuts += inside ? 1 : 0;
        first_cuts += runs.begin[w].first_cut() ? 1 : 0;
      }
      ASSERT_EQ(first_cuts, cuts > 0 ? 1 : 0) << strip;
    }
  });
}

// All warps that have some of a strip, be it less than a unit, must name the same place for their
// parts and as many of them.
TEST(RunTableTest, EveryWarpOfASharedStripHasItsOwnPartOfIt) {
  ForAllBlocks([](int strips, int /*units*/, int warps, const RunTable& runs) {
    int shared = 0;
    for (int strip = 0; strip < strips; ++strip) {
      // The run of warp w is [strips * w, strips * (w + 1)) in 1 / num_warps of a strip.
      int parts = 0;
      int num_parts = 0;
      for (int w = 0; w < warps; ++w) {
        if (strips * (w + 1) > strip * warps && strips * w < (strip + 1) * warps) ++num_parts;
      }
      if (num_parts == 1) continue;
      for (int w = 0; w < warps; ++w) {
        if (strips * (w + 1) <= strip * warps || strips * w >= (strip + 1) * warps) continue;
        const bool begins = strips * w <= strip * warps;
        const RunBegin& cut = runs.begin[begins ? w + 1 : w];
        ASSERT_TRUE(cut.cut());
        ASSERT_EQ(cut.strip(), strip);
        ASSERT_EQ(cut.shared_strip(), shared);
        ASSERT_EQ(cut.num_parts(), num_parts);
        ASSERT_EQ(begins ? cut.part() - 1 : cut.part(), parts);
        ++parts;
      }
      ++shared;
    }
    ASSERT_LT(shared, kMaxWarpsPerBlock);
  });
}

TEST(RunTableTest, TheLargestBlocksStripsFitTheirField) {
  constexpr int kStrips = (1 << 16) - 1;
  for (int warps = 1; warps <= kMaxWarpsPerBlock; ++warps) {
    const RunTable runs = CutRuns(kStrips + 1, 1, warps);
    ASSERT_EQ(runs.begin[warps].strip(), kStrips + 1);
    ASSERT_EQ(runs.begin[warps].unit, kStrips + 1);
    ASSERT_FALSE(runs.begin[warps].cut());
  }
}

}  // namespace
}  // namespace flashquant::cuda
