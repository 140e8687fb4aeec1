// Tests of the choice between the fused kernels and unpacking for cuBLAS, against the timings of
// kernels/BENCHMARKS.md.
#include "kernels/cuda/backend/linear_route.h"

#include "gtest/gtest.h"
#include "kernels/planned_memory.h"

namespace flashquant::cuda {
namespace {

TEST(FusedRowsTest, ManyRowsFollowThePassesUpToTheCopy) {
  const FusedRows rows = ChooseFusedRows(true);
  EXPECT_EQ(rows.passes, 16);
  EXPECT_EQ(rows.many_rows, 384);
}

TEST(FusedRowsTest, DevicesWithoutTheKernelForManyRowsTakeTwoPasses) {
  const FusedRows rows = ChooseFusedRows(false);
  EXPECT_EQ(rows.passes, 64);
  EXPECT_EQ(rows.many_rows, 0);
}

// The plan is in builds without CUDA too and so has the number a second time.
TEST(UnpackedBytesTest, MemoryPlanCountsWhatIsUnpackedAtOnce) {
  const auto planned = [](int64_t weights) { return PlannedScratchBytes(weights, 0, 1); };
  EXPECT_EQ(planned(int64_t{1} << 40) - planned(0), kMaxUnpackedBytes);
  EXPECT_EQ(planned(kMaxUnpackedBytes / 2) - planned(0), kMaxUnpackedBytes);
  EXPECT_EQ(planned(kMaxUnpackedBytes / 2 - 1) - planned(0), kMaxUnpackedBytes - 2);
}

}  // namespace
}  // namespace flashquant::cuda
