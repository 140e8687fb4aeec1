// Orders of names with numbers in them.
#include "engine/base/natural_order.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashquant {
namespace {

TEST(NaturalOrderTest, NumbersInNamesAreCounted) {
  std::vector<std::string> names = {"layers.10.q", "layers.2.v", "norm",       "layers.2.k",
                                    "layers.1.q",  "embed",      "layers.2.k1"};
  std::sort(names.begin(), names.end(), NaturalLess);
  EXPECT_THAT(names, ::testing::ElementsAre("embed", "layers.1.q", "layers.2.k", "layers.2.k1",
                                            "layers.2.v", "layers.10.q", "norm"));
}

TEST(NaturalOrderTest, NumbersLongerThanAnyIntegerAreCountedToo) {
  EXPECT_TRUE(NaturalLess("99999999999999999999998", "99999999999999999999999"));
  EXPECT_TRUE(NaturalLess("99999999999999999999999", "100000000000000000000000"));
}

// std::sort needs it: of two texts at most one is less, the same text never, and it is transitive.
TEST(NaturalOrderTest, ItIsAStrictOrder) {
  const std::vector<std::string> texts = {"",   "0",   "00", "1",   "01",  "001",  "10", "a",
                                          "a0", "a00", "a1", "a01", "a1b", "a01b", "b",  "a-1"};
  for (const std::string& x : texts) {
    EXPECT_FALSE(NaturalLess(x, x)) << x;
    for (const std::string& y : texts) {
      if (x != y) {
        EXPECT_NE(NaturalLess(x, y), NaturalLess(y, x)) << x << " " << y;
      }
      for (const std::string& z : texts) {
        if (NaturalLess(x, y) && NaturalLess(y, z)) {
          EXPECT_TRUE(NaturalLess(x, z)) << x << " " << y << " " << z;
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashquant
