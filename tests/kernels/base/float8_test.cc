// FP8 (e4m3) conversions: all 256 codes, and floats at and around every value and every middle
// between two.
#include "kernels/base/float8.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "gtest/gtest.h"
#include "tests/support/reference_float8.h"

namespace flashquant {
namespace {

Float8E4M3 Code(int bits) { return {static_cast<uint8_t>(bits)}; }

TEST(Float8Test, EveryCodeHasTheValueOfTheDefinition) {
  for (int bits = 0; bits < 256; ++bits) {
    const double expected = ReferenceFloat8Value(bits);
    const float value = ToFloat(Code(bits));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value)) << bits;
    } else {
      EXPECT_EQ(value, expected) << bits;
    }
    EXPECT_EQ(std::signbit(value), bits >= 128) << bits;
  }
  EXPECT_EQ(ToFloat(Code(0x7e)), kMaxFloat8E4M3);
  EXPECT_EQ(ToFloat(Code(0x08)), 0x1p-6f);
  EXPECT_EQ(ToFloat(Code(0x01)), 0x1p-9f);
}

TEST(Float8Test, EveryCodeComesBackFromItsValue) {
  for (int bits = 0; bits < 256; ++bits) {
    EXPECT_EQ(ToFloat8E4M3(ToFloat(Code(bits))), Code(bits)) << bits;
  }
}

void ExpectNearest(float value) {
  ASSERT_EQ(ToFloat8E4M3(value), Code(ReferenceFloat8Code(value))) << value;
  ASSERT_EQ(ToFloat8E4M3(-value), Code(ReferenceFloat8Code(-value))) << -value;
}

TEST(Float8Test, ValuesMiddlesAndTheirNeighboursRoundToNearestEven) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int bits = 0; bits < 126; ++bits) {
    const float low = ToFloat(Code(bits));
    const float middle = 0.5f * (low + ToFloat(Code(bits + 1)));
    for (const float x : {low, middle}) {
      ExpectNearest(x);
      ExpectNearest(std::nextafter(x, kInfinity));
      if (x > 0) ExpectNearest(std::nextafter(x, 0.0f));
    }
  }
}

TEST(Float8Test, FloatsOfEverySizeRoundToNearestEven) {
  std::mt19937 random(1);
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (int i = 0; i < 200; ++i) {
      const auto mantissa = static_cast<uint32_t>(random() & 0x7fffffu);
      ExpectNearest(std::bit_cast<float>((exponent << 23) | mantissa));
    }
  }
}

TEST(Float8Test, FiniteValuesAreClampedAndOthersBecomeNan) {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const float x : {448.1f, 464.0f, 480.0f, 1e6f, kMax}) {
    EXPECT_EQ(ToFloat(ToFloat8E4M3(x)), 448.0f) << x;
    EXPECT_EQ(ToFloat(ToFloat8E4M3(-x)), -448.0f) << x;
  }
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float x : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(),
                        std::numeric_limits<float>::signaling_NaN()}) {
    EXPECT_TRUE(std::isnan(ToFloat(ToFloat8E4M3(x)))) << x;
  }
}

}  // namespace
}  // namespace flashquant
