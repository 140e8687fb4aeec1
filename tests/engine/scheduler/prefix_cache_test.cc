// What the cache finds, and what it keeps and gives up.
#include "engine/scheduler/prefix_cache.h"

#include <vector>

#include "engine/scheduler/block_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashquant {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Blocks of two tokens in a pool of eight.
class PrefixCacheTest : public testing::Test {
 protected:
  using Tokens = std::vector<int32_t>;

  // A sequence that computed `tokens` and has its full blocks in the cache.
  BlockTable Compute(const Tokens& tokens, std::string_view salt = "") {
    BlockTable table(&allocator_);
    EXPECT_TRUE(table.Grow(static_cast<int32_t>(tokens.size()) / 2));
    PrefixChain chain;
    for (int32_t i = 0; i < table.num_blocks(); ++i) {
      const std::span<const int32_t> own(&tokens[static_cast<size_t>(2 * i)], 2);
      const int32_t kept = cache_.Extend(salt, own, table.ids()[static_cast<size_t>(i)], &chain);
      EXPECT_GT(kept, 0);
      if (kept != table.ids()[static_cast<size_t>(i)]) table.Replace(i, kept);
    }
    return table;
  }
  Tokens Find(const Tokens& tokens, std::string_view salt = "", int32_t max_blocks = 99) {
    Tokens ids;
    const PrefixChain chain = cache_.Find(salt, tokens, max_blocks, &ids);
    EXPECT_EQ(chain.num_blocks, static_cast<int32_t>(ids.size()));
    return ids;
  }

  BlockAllocator allocator_{9};
  PrefixCache cache_{&allocator_, 2};
};

TEST_F(PrefixCacheTest, FindsTheLongestBeginningInWholeBlocks) {
  const BlockTable table = Compute({1, 2, 3, 4, 5, 6});
  const auto ids = table.ids();
  EXPECT_THAT(Find({1, 2, 3, 4, 5, 6, 7}), ElementsAre(ids[0], ids[1], ids[2]));
  EXPECT_THAT(Find({1, 2, 3, 4, 5}), ElementsAre(ids[0], ids[1]));
  EXPECT_THAT(Find({1, 2, 3, 4, 5, 6}, "", 1), ElementsAre(ids[0]));
  EXPECT_THAT(Find({1, 2, 9, 9, 5, 6}), ElementsAre(ids[0]));
  EXPECT_THAT(Find({3, 4}), IsEmpty());  // the same tokens, but not behind the same ones
  EXPECT_THAT(Find({1}), IsEmpty());
  EXPECT_THAT(Find({}), IsEmpty());
}

// S13
TEST_F(PrefixCacheTest, OnlyEqualSaltsShare) {
  const BlockTable plain = Compute({1, 2, 3, 4});
  const BlockTable salted = Compute({1, 2, 3, 4}, "tenant");
  EXPECT_NE(plain.ids()[0], salted.ids()[0]);
  EXPECT_THAT(Find({1, 2, 3, 4}), ElementsAre(plain.ids()[0], plain.ids()[1]));
  EXPECT_THAT(Find({1, 2, 3, 4}, "tenant"), ElementsAre(salted.ids()[0], salted.ids()[1]));
  EXPECT_THAT(Find({1, 2, 3, 4}, "tenanT"), IsEmpty());
  EXPECT_EQ(cache_.num_nodes(), 4);
}

TEST_F(PrefixCacheTest, OneCopyOfEqualContentsIsKept) {
  BlockTable first = Compute({1, 2, 3, 4});
  BlockTable second = Compute({1, 2, 3, 4, 5, 6});
  EXPECT_EQ(first.ids()[1], second.ids()[1]);
  EXPECT_EQ(allocator_.num_used(), 3);
  EXPECT_EQ(allocator_.references(first.ids()[0]), 2);
  first.Clear();
  EXPECT_EQ(allocator_.num_used(), 3);
  second.Clear();
  EXPECT_EQ(allocator_.num_used(), 0);
  EXPECT_EQ(allocator_.num_idle(), 3);
}

// S12
TEST_F(PrefixCacheTest, TheLongestUnusedGoesFirstAndTheEndOfATextBeforeItsBeginning) {
  const BlockTable owned = Compute({9, 9, 8, 8});
  Compute({1, 2, 3, 4, 5, 6});
  Compute({7, 7});
  EXPECT_EQ(allocator_.num_idle(), 4);
  EXPECT_EQ(allocator_.num_free(), 2);
  Compute({1, 2});  // used again: now later than {7, 7}
  std::vector<int32_t> ids;
  ASSERT_TRUE(allocator_.Allocate(3, &ids));
  EXPECT_EQ(Find({1, 2, 3, 4, 5, 6}).size(), 2u);
  ASSERT_TRUE(allocator_.Allocate(1, &ids));
  EXPECT_EQ(Find({1, 2, 3, 4, 5, 6}).size(), 1u);
  ASSERT_TRUE(allocator_.Allocate(1, &ids));
  EXPECT_THAT(Find({7, 7}), IsEmpty());
  EXPECT_EQ(Find({1, 2}).size(), 1u);
  ASSERT_TRUE(allocator_.Allocate(1, &ids));
  EXPECT_THAT(Find({1, 2}), IsEmpty());
  EXPECT_FALSE(allocator_.Allocate(1, &ids));  // what has an owner is never taken
  EXPECT_EQ(Find({9, 9, 8, 8}).size(), 2u);
}

TEST_F(PrefixCacheTest, ForgettingTakesWhatHangsOnItAndNothingElse) {
  BlockTable first = Compute({1, 2, 3, 4});
  const BlockTable second = Compute({1, 2, 5, 6});
  const BlockTable other = Compute({7, 8});
  cache_.Forget(first.ids()[0]);
  EXPECT_THAT(Find({1, 2, 3, 4}), IsEmpty());
  EXPECT_THAT(Find({1, 2, 5, 6}), IsEmpty());
  EXPECT_EQ(Find({7, 8}).size(), 1u);
  first.Clear();
  EXPECT_EQ(allocator_.num_idle(), 0);
  EXPECT_EQ(cache_.num_nodes(), 1);
}

TEST_F(PrefixCacheTest, NothingIsAddedBehindWhatWasForgotten) {
  BlockTable table(&allocator_);
  ASSERT_TRUE(table.Grow(3));
  PrefixChain chain;
  const std::vector<int32_t> tokens = {1, 2};
  ASSERT_EQ(cache_.Extend("", tokens, table.ids()[0], &chain), table.ids()[0]);
  cache_.Clear();
  EXPECT_EQ(cache_.Extend("", tokens, table.ids()[1], &chain), -1);
  EXPECT_TRUE(chain.broken);
  EXPECT_EQ(cache_.num_nodes(), 0);
  table.Clear();
  EXPECT_EQ(allocator_.num_free(), 8);
}

TEST_F(PrefixCacheTest, ClearingFreesWhatNobodyOwns) {
  Compute({1, 2, 3, 4});
  BlockTable owned = Compute({5, 6});
  cache_.Clear();
  EXPECT_EQ(allocator_.num_idle(), 0);
  EXPECT_EQ(allocator_.num_free(), 7);
  EXPECT_THAT(Find({5, 6}), IsEmpty());
  owned.Clear();
  EXPECT_EQ(allocator_.num_free(), 8);
}

}  // namespace
}  // namespace flashquant
