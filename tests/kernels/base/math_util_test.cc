// Rounding and checked arithmetic, at the edges of 64 bits too.
#include "kernels/base/math_util.h"

#include <limits>

#include "gtest/gtest.h"

namespace flashquant {
namespace {

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

TEST(MathUtilTest, CeilDivIsTheLeastQuotientThatCovers) {
  for (int64_t b = 1; b <= 20; ++b) {
    for (int64_t a = 0; a <= 100; ++a) {
      const int64_t q = CeilDiv<int64_t>(a, b);
      ASSERT_GE(q * b, a);
      ASSERT_LT((q - 1) * b, a == 0 ? 1 : a);
    }
  }
}

TEST(MathUtilTest, CeilDivDoesNotWrapNearTheMaximum) {
  EXPECT_EQ(CeilDiv<uint64_t>(kMax, 2), uint64_t{1} << 63);
  EXPECT_EQ(CeilDiv<uint64_t>(kMax, kMax), 1u);
  EXPECT_EQ(CeilDiv<int32_t>(std::numeric_limits<int32_t>::max(), 256), 8388608);
}

TEST(MathUtilTest, RoundUpIsTheNextMultiple) {
  EXPECT_EQ(RoundUp<int64_t>(0, 8), 0);
  EXPECT_EQ(RoundUp<int64_t>(1, 8), 8);
  EXPECT_EQ(RoundUp<int64_t>(8, 8), 8);
  EXPECT_EQ(RoundUp<int64_t>(577, 128), 640);
}

TEST(MathUtilTest, CheckedMulReportsWrapping) {
  EXPECT_EQ(CheckedMul(uint64_t{1} << 32, (uint64_t{1} << 32) - 1), kMax - 0xffffffffu);
  EXPECT_EQ(CheckedMul(uint64_t{1} << 32, uint64_t{1} << 32), std::nullopt);
  EXPECT_EQ(CheckedMul(kMax, 1), kMax);
  EXPECT_EQ(CheckedMul(kMax, 2), std::nullopt);
  EXPECT_EQ(CheckedMul(kMax, 0), 0u);
}

TEST(MathUtilTest, CheckedAddReportsWrapping) {
  EXPECT_EQ(CheckedAdd(kMax - 1, 1), kMax);
  EXPECT_EQ(CheckedAdd(kMax, 1), std::nullopt);
  EXPECT_EQ(CheckedAdd(kMax, 0), kMax);
}

TEST(MathUtilTest, CheckedRoundUpReportsWrapping) {
  EXPECT_EQ(CheckedRoundUp(0, 256), 0u);
  EXPECT_EQ(CheckedRoundUp(257, 256), 512u);
  EXPECT_EQ(CheckedRoundUp(kMax - 255, 256), kMax - 255);
  EXPECT_EQ(CheckedRoundUp(kMax - 254, 256), std::nullopt);
  EXPECT_EQ(CheckedRoundUp(kMax, 256), std::nullopt);
}

}  // namespace
}  // namespace flashquant
