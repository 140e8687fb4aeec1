// Tests of the choice between passes of the fused kernel and unpacking for cuBLAS, against the
// timings of kernels/BENCHMARKS.md.
#include "kernels/cuda/backend/linear_route.h"

#include "gtest/gtest.h"

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

}  // namespace
}  // namespace flashquant::cuda
