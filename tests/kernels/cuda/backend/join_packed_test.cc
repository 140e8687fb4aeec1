// Joined parts are, byte for byte, what packing the joined layer gives.
#include "kernels/cuda/backend/join_packed.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/format/tile_coo_encoder.h"
#include "tests/kernels/cuda/backend/packed_parts.h"
#include "tests/support/random_weights.h"

namespace flashquant::cuda {
namespace {

// Rows [begin, end) of a layer's outliers.
TileCooMatrix SliceOutliers(const TileCooMatrix& outliers, int64_t begin, int64_t end) {
  TileCooGeometry geometry = outliers.geometry();
  geometry.n = end - begin;
  std::vector<TileCooSlot> slots;
  outliers.ForEachSlot([&](int64_t k, int64_t n, uint16_t bits) {
    if (n < begin || n >= end) return;
    slots.push_back({static_cast<int32_t>(k), static_cast<int32_t>(n - begin), bits});
  });
  auto encoded = EncodeTileCoo(geometry, slots);
  EXPECT_TRUE(encoded.ok());
  auto matrix = TileCooMatrix::Create(geometry, std::move(encoded->arrays));
  EXPECT_TRUE(matrix.ok());
  return *std::move(matrix);
}

PackedLinear PackSlice(const LinearPart& part, int64_t begin, int64_t end) {
  Int4Arrays arrays = ArraysOf(*part.int4);
  const int64_t groups = arrays.k_padded / arrays.group_size;
  arrays.n = arrays.n_padded = end - begin;
  arrays.qweight += begin * (arrays.k_padded / 2);
  arrays.scales += begin * groups;
  if (arrays.zeros != nullptr) arrays.zeros += begin * groups;
  if (part.outliers == nullptr) return PackLinear(arrays, {}, 1);
  const TileCooMatrix outliers = SliceOutliers(*part.outliers, begin, end);
  return PackLinear(arrays, PointersOf(&outliers), 1);
}

TEST(JoinPackedTest, EqualsPackingTheJoinedLayer) {
  // Few enough that a unit has one piece: which slots share a piece depends on the Tile-COO order,
  // and that on where tiles begin.
  for (const double density : {0.0, 0.03, 0.1}) {
    RandomLinearOptions options;
    options.n = 200;
    options.k = 392;
    options.group_size = 64;
    options.density = density;
    const RandomLinear layer(options);
    const LinearPart part = layer.part();
    const PackedLinear whole = PackPart(part);
    const PackedLinear joined =
        JoinPacked({PackSlice(part, 0, 64), PackSlice(part, 64, 160), PackSlice(part, 160, 200)});
    EXPECT_EQ(joined.layout.n, whole.layout.n);
    EXPECT_EQ(joined.layout.num_strips, whole.layout.num_strips);
    EXPECT_EQ(joined.layout.index_offset, whole.layout.index_offset);
    EXPECT_EQ(joined.layout.outliers_offset, whole.layout.outliers_offset);
    EXPECT_EQ(joined.layout.max_outlier_bytes, whole.layout.max_outlier_bytes);
    EXPECT_EQ(joined.bytes, whole.bytes) << "density " << density;
  }
}

TEST(JoinPackedTest, PartsOfAnotherFormOrInsideAStripDoNotFollow) {
  RandomLinearOptions options;
  options.n = 64;
  options.k = 256;
  options.group_size = 64;
  const PackedLayout first = PackPart(RandomLinear(options).part()).layout;
  EXPECT_TRUE(CanFollow(first, first));
  options.n = 40;
  const PackedLayout partial_strip = PackPart(RandomLinear(options).part()).layout;
  EXPECT_TRUE(CanFollow(first, partial_strip));
  EXPECT_FALSE(CanFollow(partial_strip, first));
  options.group_size = 32;
  EXPECT_FALSE(CanFollow(first, PackPart(RandomLinear(options).part()).layout));
  options.group_size = 64;
  options.symmetric = true;
  EXPECT_FALSE(CanFollow(first, PackPart(RandomLinear(options).part()).layout));
}

}  // namespace
}  // namespace flashquant::cuda
