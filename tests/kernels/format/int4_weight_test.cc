// Checks of the INT4 tensors: shapes, padding and values.
#include "kernels/format/int4_weight.h"

#include <functional>
#include <initializer_list>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "tests/kernels/format/tile_coo_test_data.h"

namespace flashquant {
namespace {

using ::testing::HasSubstr;

Int4Weight ValidWeight() {
  std::mt19937_64 random(1);
  return RandomInt4Weight(100, 13, 32, {}, random);  // padded to 128 and 16
}

std::string RefusalAfter(const std::function<void(Int4Weight&)>& change) {
  Int4Weight weight = ValidWeight();
  change(weight);
  const absl::Status status = ValidateInt4Weight(weight);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  return std::string(status.message());
}

TEST(Int4WeightTest, PaddedWeightIsAccepted) {
  const absl::Status status = ValidateInt4Weight(ValidWeight());
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Int4WeightTest, OneGroupPerRowOfOddLengthIsAccepted) {
  std::mt19937_64 random(2);
  Int4Weight weight = RandomInt4Weight(129, 8, 130, {}, random);
  EXPECT_EQ(weight.groups_per_row(), 1);
  const absl::Status status = ValidateInt4Weight(weight);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Int4WeightTest, LowNibbleIsTheEvenColumn) {
  Int4Weight weight = ValidWeight();
  weight.qweight[static_cast<size_t>(weight.k_padded / 2) + 3] = 0x5a;  // row 1, columns 6 and 7
  EXPECT_EQ(weight.Code(1, 6), 0xa);
  EXPECT_EQ(weight.Code(1, 7), 0x5);
}

TEST(Int4WeightTest, SymmetricWeightHasZeroPoint8AndNoZeros) {
  Int4Weight weight = ValidWeight();
  weight.symmetric = true;
  EXPECT_EQ(weight.ZeroPoint(3, 1), 8);
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.symmetric = true; }),
              HasSubstr("64 zero points, 64 groups need 0"));
}

TEST(Int4WeightTest, WrongShapesAreRefused) {
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.n = 0; }), HasSubstr("shape N 0"));
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.k = int64_t{1} << 40; }), HasSubstr("allowed 1"));
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.n_padded = 24; }), HasSubstr("padded to 24"));
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.n_padded = 8; }), HasSubstr("padded to 8"));
  for (const int64_t group : {0, -1, 16, 256, 100}) {
    EXPECT_THAT(RefusalAfter([&](Int4Weight& w) { w.group_size = group; }),
                HasSubstr(fmt::format("with group size {}", group)));
  }
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.group_size = 128; }), HasSubstr("64 scales, 16"));
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.k_padded = 160; }), HasSubstr("padded to 160"));
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.k_padded = 96; }), HasSubstr("padded to 96"));
}

TEST(Int4WeightTest, ArraysOfTheWrongSizeAreRefused) {
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.qweight.pop_back(); }),
              HasSubstr("qweight has 1023 bytes"));
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.scales.emplace_back(); }),
              HasSubstr("65 scales, 64 groups"));
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.zeros.clear(); }),
              HasSubstr("0 zero points, 64 groups need 64"));
}

TEST(Int4WeightTest, ScalesMustBeFiniteAndZeroPointsAtMost15) {
  for (const uint16_t bits : std::initializer_list<uint16_t>{0x7f80, 0xff80, 0x7fc0}) {
    EXPECT_THAT(RefusalAfter([&](Int4Weight& w) { w.scales[6].bits = bits; }),
                HasSubstr("row 1 group 2: scale"));
  }
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.zeros[9] = 16; }),
              HasSubstr("row 2 group 1: zero point 16 (limit 15)"));
}

TEST(Int4WeightTest, PaddingThatIsNotNeutralIsRefused) {
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.scales[13 * 4] = ToBFloat16(1.0f); }),
              HasSubstr("padding row 13 group 0: scale is not 0"));
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.qweight[50] ^= 1; }),
              HasSubstr("at n 0 k 100, allowed the zero point"));
  EXPECT_THAT(RefusalAfter([](Int4Weight& w) { w.qweight.back() ^= 0x80; }),
              HasSubstr("at n 15 k 127"));
}

}  // namespace
}  // namespace flashquant
