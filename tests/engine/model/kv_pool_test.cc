// How large the KV pool becomes on a card, and what is refused with which advice, before anything
// is allocated. Sizes in plain numbers; no card needed.
#include "engine/model/kv_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace flashquant {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kTokenBytes = 64 << 10;

// 1000 MiB of weights, 200 of buffers; 1024 tokens of context take 64 MiB.
MemoryPlan Plan() {
  MemoryPlan plan;
  plan.context_length = 1024;
  plan.layers = 900 * kMiB;
  plan.tables = 100 * kMiB;
  plan.activations = 150 * kMiB;
  plan.scratch = 50 * kMiB;
  plan.token = kTokenBytes;
  plan.context = 1024 * kTokenBytes;
  return plan;
}

MemoryBudget Card(int64_t total_mib, int64_t free_mib, double fraction = 0.9,
                  int64_t reserve_mib = 0) {
  return {total_mib * kMiB, free_mib * kMiB, fraction, reserve_mib * kMiB};
}

std::string Refusal(const MemoryBudget& budget, const KvPoolRequest& request = {}) {
  const auto blocks = ChooseKvBlocks(Plan(), budget, request);
  EXPECT_EQ(blocks.status().code(), absl::StatusCode::kUnavailable);
  return std::string(blocks.status().message());
}

TEST(KvPoolTest, PoolHoldsAllContextsWhenThereIsRoom) {
  const auto blocks = ChooseKvBlocks(Plan(), Card(16384, 16000), {.max_sequences = 8});
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  EXPECT_EQ(*blocks, 8 * 64 + 1);  // the null block
}

TEST(KvPoolTest, PoolTakesWhatTheFractionLeaves) {
  // 90% of 2000 MiB less 1200: 600 MiB, a block is one MiB.
  const auto blocks = ChooseKvBlocks(Plan(), Card(2000, 2000), {.max_sequences = 64});
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  EXPECT_EQ(*blocks, 600);
}

TEST(KvPoolTest, ReserveAndOtherProcessesMakeItSmaller) {
  const auto blocks = ChooseKvBlocks(Plan(), Card(16384, 1700, 0.9, 100), {.max_sequences = 64});
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  EXPECT_EQ(*blocks, 400);
}

TEST(KvPoolTest, ModelThatDoesNotFitIsRefusedWithWhatHelps) {
  const std::string weights = Refusal(Card(1000, 1000));
  EXPECT_THAT(weights, HasSubstr("needs 1200 MiB besides keys and values (weights 1000, buffers "
                                 "200), 900 MiB may be taken (90% of 1000 MiB, 1000 MiB free, 0 "
                                 "MiB reserved)"));
  EXPECT_THAT(weights, HasSubstr("--lm-head int4"));
  // The weights fit, what is around them does not: other advice.
  const std::string buffers = Refusal(Card(1250, 1250));
  EXPECT_THAT(buffers, HasSubstr("lower --token-budget or --max-sequences"));
  EXPECT_THAT(buffers, testing::Not(HasSubstr("--lm-head")));
}

TEST(KvPoolTest, PoolThatIsTooLargeIsRefusedWithTheLargestThatFits) {
  const std::string refusal = Refusal(Card(2000, 2000), {.kv_cache_bytes = 700 * kMiB});
  EXPECT_THAT(refusal, HasSubstr("a KV pool of 700 MiB besides 1200 MiB for the model"));
  EXPECT_THAT(refusal, HasSubstr("lower --kv-cache-bytes to 629145600 (or --kv-blocks to 600)"));
  EXPECT_TRUE(ChooseKvBlocks(Plan(), Card(2000, 2000), {.kv_cache_bytes = 600 * kMiB}).ok());
  EXPECT_FALSE(ChooseKvBlocks(Plan(), Card(2000, 2000), {.num_blocks = 601}).ok());
}

TEST(KvPoolTest, RoomForLessThanOneContextIsRefusedWithTheContextThatFits) {
  // 40 MiB are left: 40 blocks, one of them the null block.
  const std::string refusal = Refusal(Card(2000, 1240, 1.0));
  EXPECT_THAT(refusal, HasSubstr("one context of 1024 tokens needs 65 MiB"));
  EXPECT_THAT(refusal, HasSubstr("lower --context-length to 624 or less"));
  EXPECT_THAT(Refusal(Card(2000, 2000), {.kv_cache_bytes = 10 * kMiB}),
              HasSubstr("lower --context-length to 144 or less, or raise --kv-cache-bytes"));
}

}  // namespace
}  // namespace flashquant
