// Each validity rule on hand-made arrays: the smallest break of it is refused with its place.
#include "kernels/format/tile_coo_validate.h"

#include <functional>
#include <initializer_list>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "tests/kernels/format/tile_coo_test_data.h"

namespace flashquant {
namespace {

using ::testing::HasSubstr;

constexpr uint16_t kOne = 0x3f80;
constexpr uint16_t kTwo = 0x4000;

// K 130, N 70 in tiles of 64 x 64: 3 x 2 tiles, the last one of 2 rows and 6 columns. Tile 0 holds
// one record in bucket 1 and two in bucket 3, tile 5 one in bucket 5.
struct Parts {
  TileCooGeometry geometry;
  TileCooArrays arrays;
};

TileCooRecord Record(uint8_t col, std::array<uint8_t, 4> rows, std::array<uint16_t, 4> values) {
  return {rows, {col, col, col, col}, values};
}

Parts ValidParts() {
  Parts parts;
  parts.geometry.k = 130;
  parts.geometry.n = 70;
  parts.geometry.tile_k = 64;
  parts.geometry.tile_n = 64;
  parts.geometry.buckets_per_tile = 8;
  parts.arrays.tile_indptr = {0, 3, 3, 3, 3, 3, 4};
  parts.arrays.bucket_info.resize(6 * 8);
  for (size_t b = 0; b < 8; ++b) {
    const bool one = b == 1;
    const bool two = b == 3;
    parts.arrays.bucket_info[b] = {static_cast<uint16_t>(b < 2   ? 0
                                                         : b < 4 ? 1
                                                                 : 3),
                                   static_cast<uint16_t>(one   ? 1
                                                         : two ? 2
                                                               : 0)};
    parts.arrays.bucket_info[5 * 8 + b] = {static_cast<uint16_t>(b <= 5 ? 0 : 1),
                                           static_cast<uint16_t>(b == 5 ? 1 : 0)};
  }
  parts.arrays.records = {Record(1, {0, 1, 2, 3}, {kOne, kTwo, kOne, kTwo}),
                          Record(3, {63, 7, 8, 9}, {kOne, kOne, kOne, kOne}),
                          Record(11, {4, 4, 4, 4}, {kOne, 0, 0, 0}),
                          Record(5, {0, 1, 0, 0}, {kOne, kTwo, 0, 0})};
  return parts;
}

std::string Refusal(const Parts& parts) {
  const absl::Status status = ValidateTileCoo(parts.geometry, parts.arrays);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_FALSE(TileCooMatrix::Create(parts.geometry, parts.arrays).ok());
  return std::string(status.message());
}

std::string RefusalAfter(const std::function<void(Parts&)>& change) {
  Parts parts = ValidParts();
  change(parts);
  return Refusal(parts);
}

TEST(TileCooValidateTest, HandMadeMatrixIsAccepted) {
  const Parts parts = ValidParts();
  const absl::Status status = ValidateTileCoo(parts.geometry, parts.arrays);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(TileCooValidateTest, MessageNamesTileBucketValueAndLimit) {
  EXPECT_EQ(RefusalAfter([](Parts& p) { p.arrays.records[1].row[2] = 64; }),
            "outliers: tile 0 bucket 3: row 64 outside the tile (limit 63)");
}

TEST(TileCooValidateTest, GeometryOutsideTheListsIsRefused) {
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.geometry.k = 0; }), HasSubstr("K is 0"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.geometry.n = -1; }), HasSubstr("N is -1"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.geometry.k = int64_t{1} << 31; }),
              HasSubstr("allowed 1..2147483647"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.geometry.tile_k = 32; }), HasSubstr("tile_k is 32"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.geometry.tile_n = 512; }), HasSubstr("tile_n is 512"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.geometry.buckets_per_tile = 4; }),
              HasSubstr("buckets_per_tile is 4"));
  EXPECT_THAT(
      RefusalAfter([](Parts& p) { p.geometry.value_type = static_cast<TileCooValueType>(2); }),
      HasSubstr("value_type is 2"));
  EXPECT_THAT(
      RefusalAfter([](Parts& p) { p.geometry.column_mode = static_cast<TileCooColumnMode>(9); }),
      HasSubstr("col_mode is 9"));
  EXPECT_THAT(
      RefusalAfter([](Parts& p) { p.geometry.semantics = static_cast<TileCooSemantics>(2); }),
      HasSubstr("semantics is 2"));
  EXPECT_THAT(
      RefusalAfter([](Parts& p) { p.geometry.order_hint = static_cast<TileCooOrderHint>(3); }),
      HasSubstr("order_hint is 3"));
}

TEST(TileCooValidateTest, ArraysOfTheWrongSizeAreRefused) {
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.tile_indptr.pop_back(); }),
              HasSubstr("tile_indptr holds 6 entries, 6 tiles need 7"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.tile_indptr.clear(); }),
              HasSubstr("tile_indptr holds 0 entries"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.bucket_info.push_back({}); }),
              HasSubstr("bucket_info holds 49 buckets"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.records.pop_back(); }),
              HasSubstr("tile_indptr ends with 4, but there are 3 records"));
  // The same arrays under a shape with more tiles than they have.
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.geometry.k = p.geometry.n = 0x7fffffff; }),
              HasSubstr("tile_indptr holds 7 entries"));
}

TEST(TileCooValidateTest, TileIndptrMustStartAtZeroAndNotFall) {
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.tile_indptr[0] = 1; }),
              HasSubstr("starts with 1"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.tile_indptr[3] = 2; }),
              HasSubstr("tile 2: tile_indptr falls from 3 to 2"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.tile_indptr[1] = 0xffffffffu; }),
              HasSubstr("tile 0: 4294967295 records (limit 1024)"));
}

TEST(TileCooValidateTest, TileAboveItsCapacityIsRefused) {
  const std::string message = RefusalAfter([](Parts& p) {
    p.arrays.tile_indptr = {0, 1025, 1025, 1025, 1025, 1025, 1025};
    p.arrays.records.resize(1025);
  });
  EXPECT_THAT(message, HasSubstr("tile 0: 1025 records (limit 1024)"));
}

TEST(TileCooValidateTest, BucketOffsetsMustBePrefixSumsAlsoInEmptyBuckets) {
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.bucket_info[7].offset = 2; }),
              HasSubstr("tile 0 bucket 7: offset 2, but the counts before it sum to 3"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.bucket_info[8].offset = 1; }),
              HasSubstr("tile 1 bucket 0: offset 1"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.bucket_info[7].count = 1; }),
              HasSubstr("tile 0 bucket 7: ends at record 4 of the tile (limit 3)"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.bucket_info[3].count = 0xffff; }),
              HasSubstr("tile 0 bucket 3: ends at record 65536"));
  EXPECT_THAT(RefusalAfter([](Parts& p) {
                p.arrays.bucket_info[5 * 8 + 5].count = 0;
                for (size_t b = 6; b < 8; ++b) p.arrays.bucket_info[5 * 8 + b].offset = 0;
              }),
              HasSubstr("tile 5: bucket counts sum to 0, the tile has 1 records"));
}

TEST(TileCooValidateTest, RowsAndColumnsMustLieInsideTheEdgeTileInNullSlotsToo) {
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.records[3].row[1] = 2; }),
              HasSubstr("tile 5 bucket 5: row 2 outside the tile (limit 1)"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.records[3].row[3] = 2; }),
              HasSubstr("tile 5 bucket 5: row 2 outside the tile (limit 1)"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.records[3].col.fill(6); }),
              HasSubstr("tile 5 bucket 5: column 6 outside the tile (limit 5)"));
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.records[2].row[3] = 64; }),
              HasSubstr("tile 0 bucket 3: row 64 outside the tile (limit 63)"));
}

TEST(TileCooValidateTest, SharedColumnModeWantsFourEqualColumns) {
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.records[2].col[3] = 12; }),
              HasSubstr("columns 11 and 12 in one record of shared column mode"));
  Parts parts = ValidParts();
  parts.geometry.column_mode = TileCooColumnMode::kPerSlot;
  parts.arrays.records[2].col[3] = 12;
  const absl::Status status = ValidateTileCoo(parts.geometry, parts.arrays);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(TileCooValidateTest, ColumnInTwoBucketsIsRefusedEvenForNullSlots) {
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.records[2].col.fill(1); }),
              HasSubstr("tile 0 bucket 3: column 1 also occurs in bucket 1"));
  EXPECT_THAT(RefusalAfter([](Parts& p) {
                p.geometry.column_mode = TileCooColumnMode::kPerSlot;
                p.arrays.records[2].col[3] = 1;  // a null slot
              }),
              HasSubstr("column 1 also occurs in bucket 1"));
}

TEST(TileCooValidateTest, SameColumnInTwoTilesIsAccepted) {
  Parts parts = ValidParts();
  parts.arrays.records[3].col.fill(1);
  parts.arrays.records[3].row = {0, 1, 0, 0};
  EXPECT_TRUE(ValidateTileCoo(parts.geometry, parts.arrays).ok());
}

TEST(TileCooValidateTest, PositionStoredTwiceIsRefusedUnlessNull) {
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.records[1].row[3] = 8; }),
              HasSubstr("tile 0 bucket 3: position row 8 column 3 stored twice"));
  EXPECT_THAT(RefusalAfter([](Parts& p) {
                p.arrays.records[2] = Record(3, {63, 0, 0, 0}, {kTwo, 0, 0, 0});
              }),
              HasSubstr("position row 63 column 3 stored twice"));
}

TEST(TileCooValidateTest, RecordOfFourNullSlotsIsAccepted) {
  Parts parts = ValidParts();
  parts.arrays.records[2].value.fill(0);
  EXPECT_TRUE(ValidateTileCoo(parts.geometry, parts.arrays).ok());
}

TEST(TileCooValidateTest, ValuesMustBeFiniteAndNotMinusZero) {
  EXPECT_THAT(RefusalAfter([](Parts& p) { p.arrays.records[0].value[3] = 0x8000; }),
              HasSubstr("tile 0 bucket 1: value -0 at row 3 column 1"));
  for (const uint16_t bits : std::initializer_list<uint16_t>{0x7f80, 0xff80, 0x7f81, 0xffff}) {
    EXPECT_THAT(RefusalAfter([&](Parts& p) { p.arrays.records[0].value[3] = bits; }),
                HasSubstr("is not finite"));
  }
  // 7c00 is a BF16 number and FP16's infinity.
  Parts parts = ValidParts();
  parts.arrays.records[0].value[3] = 0x7c00;
  EXPECT_TRUE(ValidateTileCoo(parts.geometry, parts.arrays).ok());
  parts.geometry.value_type = TileCooValueType::kHalf;
  EXPECT_THAT(Refusal(parts), HasSubstr("value 0x7c00 at row 3 column 1 is not finite"));
}

TEST(TileCooValidateTest, StoredDensityCountsEverySlot) {
  Parts parts = ValidParts();
  const auto matrix = TileCooMatrix::Create(parts.geometry, parts.arrays);
  ASSERT_TRUE(matrix.ok());
  EXPECT_EQ(matrix->num_slots(), 16);
  EXPECT_DOUBLE_EQ(matrix->stored_density(), 16.0 / (130.0 * 70.0));
}

class OutliersAgainstInt4Test : public ::testing::Test {
 protected:
  OutliersAgainstInt4Test() {
    geometry_.k = 100;
    geometry_.n = 70;
    geometry_.tile_k = 64;
    geometry_.tile_n = 64;
    slots_ = RandomSlots(geometry_, 0.03, random_);
    weight_ = RandomInt4Weight(100, 70, 32, slots_, random_);
  }
  TileCooMatrix Matrix() {
    auto encoded = EncodeTileCoo(geometry_, slots_);
    EXPECT_TRUE(encoded.ok()) << encoded.status();
    auto matrix = TileCooMatrix::Create(geometry_, std::move(encoded->arrays));
    EXPECT_TRUE(matrix.ok()) << matrix.status();
    return *std::move(matrix);
  }

  std::mt19937_64 random_{5};
  TileCooGeometry geometry_;
  std::vector<TileCooSlot> slots_;
  Int4Weight weight_;
};

TEST_F(OutliersAgainstInt4Test, WeightWithZeroPointsUnderEverySlotIsAccepted) {
  const absl::Status status = ValidateOutliersAgainstInt4(weight_, Matrix());
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(OutliersAgainstInt4Test, CodeUnderASlotThatIsNotTheZeroPointIsRefusedInReplaceModeOnly) {
  const TileCooSlot& slot = slots_[slots_.size() / 2];
  const auto index = static_cast<size_t>(slot.n * (weight_.k_padded / 2) + slot.k / 2);
  weight_.qweight[index] = static_cast<uint8_t>(weight_.qweight[index] ^ (slot.k % 2 ? 0x10 : 1));
  const absl::Status status = ValidateOutliersAgainstInt4(weight_, Matrix());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(fmt::format("slot at k {} n {}", slot.k, slot.n)));
  geometry_.semantics = TileCooSemantics::kResidual;
  EXPECT_TRUE(ValidateOutliersAgainstInt4(weight_, Matrix()).ok());
}

TEST_F(OutliersAgainstInt4Test, OtherShapeIsRefused) {
  const Int4Weight other = RandomInt4Weight(100, 69, 32, {}, random_);
  const absl::Status status = ValidateOutliersAgainstInt4(other, Matrix());
  EXPECT_THAT(std::string(status.message()), HasSubstr("N 70 beside an INT4 weight of K 100 N 69"));
}

TEST_F(OutliersAgainstInt4Test, GroupSizeMustDivideTheTile) {
  const Int4Weight other = RandomInt4Weight(200, 70, 128, {}, random_);
  geometry_.k = 200;
  slots_.clear();
  const absl::Status status = ValidateOutliersAgainstInt4(other, Matrix());
  EXPECT_THAT(std::string(status.message()), HasSubstr("tile_k 64 is no multiple"));
}

}  // namespace
}  // namespace flashquant
