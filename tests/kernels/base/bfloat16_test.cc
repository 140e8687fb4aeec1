// BFloat16 and Half conversions over all 65536 patterns, against values put together with ldexp and
// against the rounding rule stated on neighbours and midpoints.
#include "kernels/base/bfloat16.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace flashquant {
namespace {

// The value of a binary format from its fields.
double ValueOf(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const uint32_t exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const bool negative = (bits >> (exponent_bits + mantissa_bits)) != 0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  double magnitude = 0.0;
  if (exponent == (1u << exponent_bits) - 1) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    magnitude = std::ldexp(mantissa + (1u << mantissa_bits),
                           static_cast<int>(exponent) - bias - mantissa_bits);
  }
  return negative ? -magnitude : magnitude;
}

struct BFloat16Format {
  using Type = BFloat16;
  static constexpr int kExponentBits = 8;
  static constexpr int kMantissaBits = 7;
  static Type From(float value) { return ToBFloat16(value); }
};
struct HalfFormat {
  using Type = Half;
  static constexpr int kExponentBits = 5;
  static constexpr int kMantissaBits = 10;
  static Type From(float value) { return ToHalf(value); }
};

template <typename Format>
class SmallFloatTest : public ::testing::Test {
 protected:
  using Type = typename Format::Type;
  static constexpr uint32_t kInfinity = ((1u << Format::kExponentBits) - 1)
                                        << Format::kMantissaBits;
  static double Value(uint32_t bits) {
    return ValueOf(bits, Format::kExponentBits, Format::kMantissaBits);
  }
  static Type Bits(uint32_t bits) { return Type{static_cast<uint16_t>(bits)}; }
  static uint32_t Round(float value) { return Format::From(value).bits; }
};
using Formats = ::testing::Types<BFloat16Format, HalfFormat>;
TYPED_TEST_SUITE(SmallFloatTest, Formats);

TYPED_TEST(SmallFloatTest, EveryPatternHasTheValueOfItsFields) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = static_cast<double>(ToFloat(TestFixture::Bits(bits)));
    const double expected = TestFixture::Value(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
    } else {
      ASSERT_EQ(value, expected) << bits;
      ASSERT_EQ(std::signbit(value), std::signbit(expected)) << bits;
    }
  }
}

TYPED_TEST(SmallFloatTest, EveryValueRoundsToItself) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = ToFloat(TestFixture::Bits(bits));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(ToFloat(TestFixture::Bits(TestFixture::Round(value))))) << bits;
    } else {
      ASSERT_EQ(TestFixture::Round(value), bits);
    }
  }
}

// Between neighbours a < b the midpoint goes to the even pattern, anything beside it to the nearer.
TYPED_TEST(SmallFloatTest, RoundsToNearestAndTiesToEven) {
  for (const uint32_t sign : {0u, 0x8000u}) {
    for (uint32_t bits = 0; bits + 1 < TestFixture::kInfinity; ++bits) {
      const uint32_t lower = sign | bits;
      const uint32_t upper = sign | (bits + 1);
      const double middle = (TestFixture::Value(lower) + TestFixture::Value(upper)) / 2;
      const auto midpoint = static_cast<float>(middle);
      ASSERT_EQ(static_cast<double>(midpoint), middle);  // exact, so this is a true tie
      ASSERT_EQ(TestFixture::Round(midpoint), bits % 2 == 0 ? lower : upper) << bits;
      const float zero = 0.0f;
      ASSERT_EQ(TestFixture::Round(std::nextafter(midpoint, zero)), lower) << bits;
      const float far = std::copysign(std::numeric_limits<float>::infinity(), midpoint);
      ASSERT_EQ(TestFixture::Round(std::nextafter(midpoint, far)), upper) << bits;
    }
  }
}

TYPED_TEST(SmallFloatTest, OverflowBeginsHalfAStepBeyondTheGreatestNumber) {
  const double greatest = TestFixture::Value(TestFixture::kInfinity - 1);
  const double before = TestFixture::Value(TestFixture::kInfinity - 2);
  const auto edge = static_cast<float>(greatest + (greatest - before) / 2);
  EXPECT_EQ(TestFixture::Round(edge), TestFixture::kInfinity);
  EXPECT_EQ(TestFixture::Round(std::nextafter(edge, 0.0f)), TestFixture::kInfinity - 1);
  EXPECT_EQ(TestFixture::Round(-edge), TestFixture::kInfinity | 0x8000u);
  EXPECT_EQ(TestFixture::Round(std::numeric_limits<float>::max()), TestFixture::kInfinity);
  EXPECT_EQ(TestFixture::Round(std::numeric_limits<float>::infinity()), TestFixture::kInfinity);
}

TYPED_TEST(SmallFloatTest, NanStaysNanAndKeepsItsSign) {
  for (const uint32_t pattern : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0x7f808000u}) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const auto bits = TestFixture::Round(std::bit_cast<float>(pattern | sign));
      EXPECT_GT(bits & 0x7fffu, TestFixture::kInfinity) << std::hex << pattern;
      EXPECT_EQ(bits >> 15, sign >> 31);
    }
  }
}

TYPED_TEST(SmallFloatTest, ValuesBelowHalfTheSmallestSubnormalBecomeZeroOfTheirSign) {
  const auto smallest = static_cast<float>(TestFixture::Value(1));
  EXPECT_EQ(TestFixture::Round(smallest / 2), 0u);
  EXPECT_EQ(TestFixture::Round(-smallest / 2), 0x8000u);
  EXPECT_EQ(TestFixture::Round(std::numeric_limits<float>::denorm_min()), 0u);
}

TEST(BFloat16Test, IsFiniteAgreesWithTheFloatForEveryPattern) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BFloat16 value{static_cast<uint16_t>(bits)};
    ASSERT_EQ(IsFinite(value), std::isfinite(ToFloat(value))) << bits;
  }
}

}  // namespace
}  // namespace flashquant
