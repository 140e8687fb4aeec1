// Block ids: all or nothing, the null block, reference counts, and tables that give back.
#include "engine/scheduler/block_allocator.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "engine/scheduler/block_table.h"
#include "gtest/gtest.h"
#include "kernels/format/paged_kv.h"

namespace flashquant {
namespace {

TEST(BlockAllocatorTest, AllocateIsAllOrNothing) {
  BlockAllocator allocator(5);
  std::vector<int32_t> ids;
  EXPECT_TRUE(allocator.Allocate(3, &ids));
  EXPECT_FALSE(allocator.Allocate(2, &ids));
  EXPECT_EQ(ids.size(), 3u);
  EXPECT_EQ(allocator.num_free(), 1);
  EXPECT_EQ(allocator.num_failures(), 1);
  EXPECT_TRUE(allocator.Allocate(1, &ids));
  EXPECT_EQ(allocator.num_free(), 0);
}

TEST(BlockAllocatorTest, HandsOutEveryBlockOnceButNeverTheNullBlock) {
  BlockAllocator allocator(9);
  EXPECT_EQ(allocator.usable_blocks(), 8);
  std::vector<int32_t> ids;
  ASSERT_TRUE(allocator.Allocate(8, &ids));
  const std::set<int32_t> distinct(ids.begin(), ids.end());
  EXPECT_EQ(distinct.size(), 8u);
  EXPECT_FALSE(distinct.contains(kNullBlock));
  EXPECT_EQ(*distinct.rbegin(), 8);
}

TEST(BlockAllocatorTest, ASharedBlockIsFreeAfterItsLastOwner) {
  BlockAllocator allocator(2);
  std::vector<int32_t> ids;
  ASSERT_TRUE(allocator.Allocate(1, &ids));
  allocator.AddReference(ids[0]);
  allocator.Release(ids[0]);
  EXPECT_EQ(allocator.num_free(), 0);
  allocator.Release(ids[0]);
  EXPECT_EQ(allocator.num_free(), 1);
}

TEST(BlockAllocatorTest, NothingIsAlwaysThere) {
  BlockAllocator allocator(1);
  std::vector<int32_t> ids;
  EXPECT_TRUE(allocator.Allocate(0, &ids));
  EXPECT_FALSE(allocator.Allocate(1, &ids));
}

TEST(BlockAllocatorDeathTest, ReturningABlockTwiceIsACallerBug) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  BlockAllocator allocator(2);
  EXPECT_DEATH(allocator.Release(1), "check failed");
  EXPECT_DEATH(allocator.Release(kNullBlock), "check failed");
}

TEST(BlockTableTest, GivesItsBlocksBackWhenItDies) {
  BlockAllocator allocator(6);
  {
    BlockTable table(&allocator);
    EXPECT_TRUE(table.Grow(2));
    EXPECT_TRUE(table.Grow(2));
    EXPECT_FALSE(table.Grow(2));
    EXPECT_EQ(table.num_blocks(), 4);
  }
  EXPECT_EQ(allocator.num_free(), 5);
}

TEST(BlockTableTest, MovingTakesTheBlocksAlong) {
  BlockAllocator allocator(6);
  BlockTable first(&allocator);
  ASSERT_TRUE(first.Grow(2));
  BlockTable second(std::move(first));
  EXPECT_EQ(second.num_blocks(), 2);
  BlockTable third(&allocator);
  ASSERT_TRUE(third.Grow(3));
  third = std::move(second);
  EXPECT_EQ(third.num_blocks(), 2);
  EXPECT_EQ(allocator.num_free(), 3);
}

}  // namespace
}  // namespace flashquant
