// FP8 to FP16 by integer arithmetic, as GPUs without an instruction for it do it: every pair of
// codes.
#include "kernels/cuda/backend/paged_attention/fp8_pair.h"

#include <cmath>

#include "gtest/gtest.h"
#include "kernels/base/bfloat16.h"
#include "tests/support/reference_float8.h"

namespace flashquant::cuda {
namespace {

void ExpectValue(uint32_t half_bits, uint32_t code) {
  const double value =
      static_cast<double>(kFp8HalfFactor * ToFloat(Half{static_cast<uint16_t>(half_bits)}));
  const double expected = ReferenceFloat8Value(static_cast<int>(code));
  if (std::isnan(expected)) {
    ASSERT_TRUE(std::isnan(value)) << code;
  } else {
    ASSERT_EQ(value, expected) << code;
    ASSERT_EQ(std::signbit(value), code >= 128) << code;
  }
}

TEST(Fp8PairTest, EveryPairOfCodesKeepsItsValues) {
  for (uint32_t low = 0; low < 256; ++low) {
    for (uint32_t high = 0; high < 256; ++high) {
      const uint32_t halves = HalvesFromFp8(high << 24 | low << 8);
      ExpectValue(halves & 0xffffu, low);
      ExpectValue(halves >> 16, high);
    }
  }
}

}  // namespace
}  // namespace flashquant::cuda
