// What ncu prints is read right, and without ncu or a GPU there is no number.
#include "kernels/bench/profiled_traffic.h"

#include <string>

#include "gtest/gtest.h"

namespace flashquant::bench {
namespace {

// Printed by ncu 2025.3 on an H200.
constexpr char kRead[] =
    "\"0\",\"13021\",\"linear_w4a16_bench\",\"127.0.0.1\",\"void LinearW4A16Kernel<1, 1, 0, "
    "1>(KernelArgs)\",\"1\",\"19\",\"(288, 1, 1)\",\"(8, 15, 1)\",\"0\",\"9.0\",\"Command line "
    "profiler metrics\",\"dram__bytes_read.sum\",\"byte\",\"9,491,456\"\n";
constexpr char kWritten[] =
    "\"0\",\"13021\",\"linear_w4a16_bench\",\"127.0.0.1\",\"void LinearW4A16Kernel<1, 1, 0, "
    "1>(KernelArgs)\",\"1\",\"19\",\"(288, 1, 1)\",\"(8, 15, 1)\",\"0\",\"9.0\",\"Command line "
    "profiler metrics\",\"dram__bytes_write.sum\",\"byte\",\"512\"\n";

TEST(ProfiledTrafficTest, ReadAndWrittenBytesAreAdded) {
  const std::string csv = std::string("==PROF== Connected\n\"ID\",\"Metric Name\"\n") + kRead +
                          kWritten + "==PROF== Disconnected\n";
  EXPECT_EQ(ParseProfiledTraffic(csv), 9491968);
}

TEST(ProfiledTrafficTest, NoNumberWithoutBothMetrics) {
  EXPECT_FALSE(ParseProfiledTraffic("").has_value());
  EXPECT_FALSE(ParseProfiledTraffic(kRead).has_value());
  EXPECT_FALSE(ParseProfiledTraffic("==ERROR== ERR_NVGPUCTRPERM\n").has_value());
}

TEST(ProfiledTrafficTest, WhatIsNoNumberIsNone) {
  std::string csv = std::string(kRead) + kWritten;
  csv.replace(csv.find("9,491,456"), 9, "n/a");
  EXPECT_FALSE(ParseProfiledTraffic(csv).has_value());
  EXPECT_FALSE(ParseProfiledTraffic("\"dram__bytes_read.sum\"").has_value());
}

TEST(ProfiledTrafficTest, AProgramThatIsNotThereGivesNone) {
  EXPECT_FALSE(ProfiledTraffic("/no such 'program'", {4096, 4096}, 8, 0.01).has_value());
}

}  // namespace
}  // namespace flashquant::bench
