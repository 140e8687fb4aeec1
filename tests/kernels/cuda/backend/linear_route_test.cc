// Tests of the choice between passes of the fused kernel and unpacking for cuBLAS, against the
// timings of kernels/BENCHMARKS.md.
#include "kernels/cuda/backend/linear_route.h"

#include "gtest/gtest.h"
#include "kernels/planned_memory.h"

namespace flashquant::cuda {
namespace {

PackedLayout Layout(int32_t k, int32_t n, double density) {
  PackedLayout layout;
  layout.k = k;
  layout.n = n;
  layout.outliers_offset = int64_t{k} * n / 2;
  layout.num_bytes = layout.outliers_offset + static_cast<int64_t>(4 * density * k * n);
  return layout;
}

TEST(MaxPassRowsTest, LargeLayersTakeThreePassesAndSmallOnesTwo) {
  EXPECT_EQ(MaxPassRows(9, Layout(4096, 4096, 0.01)), 64);
  EXPECT_EQ(MaxPassRows(9, Layout(4096, 6144, 0.01)), 64);
  EXPECT_EQ(MaxPassRows(9, Layout(14336, 4096, 0.01)), 96);
  EXPECT_EQ(MaxPassRows(9, Layout(14848, 75264, 0.01)), 96);
}

TEST(MaxPassRowsTest, ManyOutliersCostThePassesMore) {
  EXPECT_EQ(MaxPassRows(9, Layout(4096, 28672, 0.0)), 96);
  EXPECT_EQ(MaxPassRows(9, Layout(4096, 28672, 0.03)), 64);
}

TEST(MaxPassRowsTest, DevicesNobodyMeasuredTakeTwoPasses) {
  for (const int32_t major : {8, 10, 12}) {
    EXPECT_EQ(MaxPassRows(major, Layout(14848, 75264, 0.01)), 64);
  }
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
