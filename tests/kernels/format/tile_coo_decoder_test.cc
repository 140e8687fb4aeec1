// Dense decoding and statistics on small matrices whose result is written out by hand or computed
// position by position.
#include "kernels/format/tile_coo_decoder.h"

#include "gtest/gtest.h"
#include "kernels/format/tile_coo_statistics.h"
#include "tests/kernels/format/tile_coo_test_data.h"

namespace flashquant {
namespace {

TileCooMatrix MakeMatrix(const TileCooGeometry& geometry, const std::vector<TileCooSlot>& slots) {
  auto encoded = EncodeTileCoo(geometry, slots);
  EXPECT_TRUE(encoded.ok()) << encoded.status();
  auto matrix = TileCooMatrix::Create(geometry, std::move(encoded->arrays));
  EXPECT_TRUE(matrix.ok()) << matrix.status();
  return *std::move(matrix);
}

TEST(TileCooDecoderTest, SlotsLandAtTheirPositionsAcrossTiles) {
  TileCooGeometry geometry;
  geometry.k = 257;
  geometry.n = 129;
  const TileCooMatrix matrix = MakeMatrix(geometry, {{0, 0, 0x3f80},      // 1
                                                     {256, 128, 0xc000},  // -2
                                                     {255, 127, 0x3e80},  // 0.25
                                                     {256, 0, 0x0001}});  // smallest subnormal
  const auto dense = DecodeOutliers(matrix);
  ASSERT_TRUE(dense.ok());
  ASSERT_EQ(dense->size(), 257u * 129u);
  std::vector<float> expected(257u * 129u, 0.0f);
  expected[0] = 1.0f;
  expected[256 * 129 + 128] = -2.0f;
  expected[255 * 129 + 127] = 0.25f;
  expected[256 * 129] = 0x1p-133f;
  EXPECT_EQ(*dense, expected);
}

TEST(TileCooDecoderTest, HalfValuesAreReadAsHalf) {
  TileCooGeometry geometry;
  geometry.k = 64;
  geometry.n = 64;
  geometry.value_type = TileCooValueType::kHalf;
  const auto dense = DecodeOutliers(MakeMatrix(geometry, {{1, 2, 0x3c00}, {3, 2, 0x7bff}}));
  ASSERT_TRUE(dense.ok());
  EXPECT_EQ((*dense)[1 * 64 + 2], 1.0f);
  EXPECT_EQ((*dense)[3 * 64 + 2], 65504.0f);
}

TEST(TileCooDecoderTest, PerSlotColumnsAreReadSlotBySlot) {
  TileCooGeometry geometry;
  geometry.k = 64;
  geometry.n = 64;
  geometry.tile_k = 64;
  geometry.tile_n = 64;
  geometry.buckets_per_tile = 8;
  geometry.column_mode = TileCooColumnMode::kPerSlot;
  TileCooArrays arrays;
  arrays.tile_indptr = {0, 1};
  arrays.bucket_info.assign(8, {1, 0});
  arrays.bucket_info[0] = {0, 1};
  arrays.records = {{{1, 2, 3, 4}, {10, 20, 30, 40}, {0x3f80, 0x4000, 0x4040, 0}}};
  const auto matrix = TileCooMatrix::Create(geometry, std::move(arrays));
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  const auto dense = DecodeOutliers(*matrix);
  ASSERT_TRUE(dense.ok());
  EXPECT_EQ((*dense)[1 * 64 + 10], 1.0f);
  EXPECT_EQ((*dense)[2 * 64 + 20], 2.0f);
  EXPECT_EQ((*dense)[3 * 64 + 30], 3.0f);
  EXPECT_EQ((*dense)[4 * 64 + 40], 0.0f);
}

TEST(TileCooDecoderTest, WeightIsDequantPlusOutliersAtEveryPosition) {
  std::mt19937_64 random(21);
  TileCooGeometry geometry;
  geometry.k = 100;
  geometry.n = 70;
  const std::vector<TileCooSlot> slots = RandomSlots(geometry, 0.05, random);
  const Int4Weight weight = RandomInt4Weight(100, 70, 32, slots, random);
  const TileCooMatrix matrix = MakeMatrix(geometry, slots);
  std::vector<double> outlier(100 * 70, 0.0);
  for (const TileCooSlot& slot : slots) {
    outlier[static_cast<size_t>(slot.k * 70 + slot.n)] =
        static_cast<double>(ToFloat(BFloat16{slot.value_bits}));
  }
  const auto with = DecodeWeight(weight, &matrix);
  const auto without = DecodeWeight(weight, nullptr);
  ASSERT_TRUE(with.ok() && without.ok());
  for (size_t k = 0; k < 100; ++k) {
    for (size_t n = 0; n < 70; ++n) {
      const uint8_t byte = weight.qweight[n * 64 + k / 2];
      const int code = k % 2 == 0 ? byte % 16 : byte / 16;
      const double dequant = static_cast<double>(ToFloat(weight.scales[n * 4 + k / 32])) *
                             (code - weight.zeros[n * 4 + k / 32]);
      ASSERT_EQ((*without)[k * 70 + n], dequant) << k << " " << n;
      ASSERT_EQ((*with)[k * 70 + n], dequant + outlier[k * 70 + n]) << k << " " << n;
    }
  }
}

TEST(TileCooDecoderTest, OtherShapesAndHugeMatricesAreRefused) {
  std::mt19937_64 random(22);
  TileCooGeometry geometry;
  geometry.k = 64;
  geometry.n = 8;
  const TileCooMatrix matrix = MakeMatrix(geometry, {});
  EXPECT_EQ(DecodeWeight(RandomInt4Weight(64, 16, 64, {}, random), &matrix).status().code(),
            absl::StatusCode::kInvalidArgument);
  geometry.k = 1 << 20;
  geometry.n = 1 << 12;
  geometry.tile_n = 256;
  geometry.buckets_per_tile = 8;
  EXPECT_EQ(DecodeOutliers(MakeMatrix(geometry, {})).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(TileCooStatisticsTest, CountsOfASmallMatrix) {
  // Tile 0: column 0 with five slots (two records, three null slots), column 8 with four (one
  // record), both in residue class 0, so in buckets 0 and 8. Tile 1 stays empty.
  TileCooGeometry geometry;
  geometry.k = 64;
  geometry.n = 128;
  geometry.tile_k = 64;
  geometry.tile_n = 64;
  geometry.buckets_per_tile = 16;
  std::vector<TileCooSlot> slots;
  for (int32_t k = 0; k < 5; ++k) slots.push_back({k, 0, 0x3f80});
  for (int32_t k = 0; k < 4; ++k) slots.push_back({k, 8, 0x3f80});
  const TileCooMatrix matrix = MakeMatrix(geometry, slots);
  const TileCooStatistics statistics = ComputeTileCooStatistics(matrix);
  EXPECT_EQ(statistics.num_tiles, 2);
  EXPECT_EQ(statistics.num_empty_tiles, 1);
  EXPECT_EQ(statistics.num_records, 3);
  EXPECT_EQ(statistics.num_null_slots, 3);
  EXPECT_EQ(statistics.max_tile_records, 3u);
  EXPECT_EQ(statistics.max_bucket_records, 2u);
  EXPECT_DOUBLE_EQ(statistics.mean_tile_records(), 1.5);
  EXPECT_DOUBLE_EQ(statistics.bucket_balance, 3.0 / (2.0 * 16.0));
  // 4 (2 + 1) + 4 * 2 * 16 + 4 * 12
  EXPECT_EQ(PaperStorageBytes(matrix), 188);
}

TEST(TileCooStatisticsTest, EmptyMatrixHasNoFill) {
  TileCooGeometry geometry;
  geometry.k = 10;
  geometry.n = 10;
  const TileCooStatistics statistics = ComputeTileCooStatistics(MakeMatrix(geometry, {}));
  EXPECT_EQ(statistics.num_empty_tiles, 1);
  EXPECT_EQ(statistics.max_tile_records, 0u);
  EXPECT_EQ(statistics.bucket_balance, 0.0);
}

TEST(TileCooStatisticsTest, PaperFormulaOfALargeLayerAtOnePercent) {
  // 4096 x 14336 in tiles of 256 x 128 with 32 buckets: 1792 tiles.
  EXPECT_EQ(PaperStorageBytes(1792, 32, 587202), 4 * 1793 + 4 * 1792 * 32 + 4 * 587202);
}

}  // namespace
}  // namespace flashquant
