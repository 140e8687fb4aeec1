// When freed memory is given back to the system, and that it is.
#include "server/free_memory.h"

#include <malloc.h>

#include <memory>
#include <vector>

#include "gtest/gtest.h"

namespace flashquant {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

MemoryUse Use(int64_t resident_mib, int64_t allocated_mib) {
  return {resident_mib * kMiB, allocated_mib * kMiB};
}

class TrimRuleTest : public ::testing::Test {
 protected:
  TrimRuleTest() {
    rule_.Look(Use(110, 30), 0);
    rule_.Look(Use(110, 30), 0);
    rule_.Trimmed(Use(100, 30));
  }
  TrimRule rule_;
};

TEST(TrimRuleStartTest, SecondIdleLookGivesBackWhatTheStartLeft) {
  TrimRule rule;
  EXPECT_FALSE(rule.Look(Use(100, 30), 0));
  EXPECT_FALSE(rule.Look(Use(500, 30), 1));
  EXPECT_FALSE(rule.Look(Use(100, 30), 0));
  EXPECT_TRUE(rule.Look(Use(100, 30), 0));
}

TEST_F(TrimRuleTest, WhatABurstLeftGoesBackOnceItIsOver) {
  EXPECT_FALSE(rule_.Look(Use(130, 60), 1000));
  EXPECT_FALSE(rule_.Look(Use(130, 31), 1000));
  EXPECT_FALSE(rule_.Look(Use(130, 30), 0)) << "the next calls may be on their way";
  EXPECT_TRUE(rule_.Look(Use(130, 30), 0));
  rule_.Trimmed(Use(100, 30));
  EXPECT_FALSE(rule_.Look(Use(100, 30), 0));
}

TEST_F(TrimRuleTest, LittleIsNotWorthATrim) {
  MemoryUse use = Use(100, 30);
  use.resident_bytes += TrimRule::kIdleBytes;
  EXPECT_TRUE(rule_.Look(use, 0));
  --use.resident_bytes;
  EXPECT_FALSE(rule_.Look(use, 0));
}

TEST_F(TrimRuleTest, MemoryInUseIsNoReason) { EXPECT_FALSE(rule_.Look(Use(900, 830), 0)); }

TEST_F(TrimRuleTest, BusyServerGivesBackOnlyMuch) {
  EXPECT_FALSE(rule_.Look(Use(163, 30), 5));
  EXPECT_TRUE(rule_.Look(Use(164, 30), 5));
  // What did not go back (a pool's pages, used for the first time) does not ask again.
  rule_.Trimmed(Use(164, 30));
  EXPECT_FALSE(rule_.Look(Use(227, 30), 5));
  EXPECT_FALSE(rule_.Look(Use(164, 30), 0));
  EXPECT_FALSE(rule_.Look(Use(164, 30), 0));
}

TEST_F(TrimRuleTest, LowestLevelCounts) {
  EXPECT_FALSE(rule_.Look(Use(60, 30), 5));
  EXPECT_TRUE(rule_.Look(Use(124, 30), 5));
}

TEST(MemoryUseTest, FreedMemoryIsGivenBackByATrim) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer's allocator is another one";
#endif
  constexpr size_t kBytes = 4000;  // from the heap, not a mapping of its own
  std::vector<std::unique_ptr<char[]>> pieces(16 * kMiB / kBytes);
  const MemoryUse at_first = ReadMemoryUse();
  for (auto& piece : pieces) piece = std::make_unique<char[]>(kBytes);
  const MemoryUse full = ReadMemoryUse();
  EXPECT_GE(full.allocated_bytes - at_first.allocated_bytes, 15 * kMiB);
  EXPECT_GE(full.resident_bytes - at_first.resident_bytes, 15 * kMiB);
  // The last stays: the allocator itself gives back at the heap's end only.
  for (size_t i = 0; i + 1 < pieces.size(); ++i) pieces[i].reset();
  const MemoryUse freed = ReadMemoryUse();
  EXPECT_LE(freed.allocated_bytes - at_first.allocated_bytes, kMiB);
  EXPECT_GE(freed.resident_bytes - at_first.resident_bytes, 15 * kMiB);
  malloc_trim(0);
  EXPECT_LE(ReadMemoryUse().resident_bytes - at_first.resident_bytes, kMiB);
}

}  // namespace
}  // namespace flashquant
