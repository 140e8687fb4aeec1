// The attention plan of prefill rows and the rule for decode rows: every row sees every one of its
// keys once, and is cut the same way in any batch.
#include "kernels/cuda/backend/paged_attention/plan.h"

#include <cstdint>
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace flashquant::cuda {
namespace {

constexpr int32_t kBlockTokens = 16;
constexpr int32_t kWideRows = 64;

struct Sequence {
  int32_t context = 0;
  int32_t rows = 0;  // query rows, the last of the context
};

class Batch {
 public:
  explicit Batch(const std::vector<Sequence>& sequences) {
    for (const Sequence& sequence : sequences) {
      contexts_.push_back(sequence.context);
      query_indptr_.push_back(query_indptr_.back() + sequence.rows);
      const int32_t blocks = (sequence.context + kBlockTokens - 1) / kBlockTokens;
      block_indptr_.push_back(block_indptr_.back() + blocks);
    }
  }
  AttentionPlan Plan(int32_t group, int32_t window) const {
    AttentionBatch batch;
    batch.num_sequences = static_cast<int32_t>(contexts_.size());
    batch.num_tokens = query_indptr_.back();
    batch.query_indptr = query_indptr_.data();
    batch.context_lengths = contexts_.data();
    batch.block_indptr = block_indptr_.data();
    return MakeAttentionPlan(batch, group, window, kWideRows);
  }
  const std::vector<int32_t>& query_indptr() const { return query_indptr_; }
  const std::vector<int32_t>& block_indptr() const { return block_indptr_; }

 private:
  std::vector<int32_t> contexts_;
  std::vector<int32_t> query_indptr_ = {0};
  std::vector<int32_t> block_indptr_ = {0};
};

// How often each (token, head of the group, key) is attended to, by the rule that the kernels apply
// to an item: a row sees keys up to its own position, within its window.
using Seen = std::map<std::tuple<int32_t, int32_t, int32_t>, int>;

void AddItem(const AttentionItem& item, int32_t group, int32_t window, Seen* seen) {
  for (int32_t row = item.first_row; row < item.first_row + item.num_rows; ++row) {
    const int32_t position = item.first_position + row / group;
    for (int32_t key = item.first_key; key < item.end_key; ++key) {
      if (key > position || (window > 0 && key <= position - window)) continue;
      ++(*seen)[{item.first_token + row / group, row % group, key}];
    }
  }
}

// What the ranks of the decode kernel see, in steps of kKeys.
template <int kKeys>
void AddSingleRow(const Sequence& sequence, int ranks, int32_t token, int32_t group, int32_t window,
                  Seen* seen) {
  const DecodeSteps<kKeys> steps{ranks};
  const int32_t first_seen = window > 0 ? std::max(0, sequence.context - window) : 0;
  for (int rank = 0; rank < ranks; ++rank) {
    for (int step = steps.First(rank, first_seen); step < sequence.context;
         step = steps.Next(step)) {
      EXPECT_EQ(step % kKeys, 0);
      EXPECT_EQ(steps.RankOf(step), rank);
      for (int key = std::max(step, first_seen); key < std::min(step + kKeys, sequence.context);
           ++key) {
        for (int32_t head = 0; head < group; ++head) ++(*seen)[{token, head, key}];
      }
    }
  }
}

void AddSingleRows(const std::vector<Sequence>& sequences, const Batch& batch, int32_t group,
                   int32_t window, Seen* seen) {
  for (size_t s = 0; s < sequences.size(); ++s) {
    if (sequences[s].rows != 1) continue;
    const int32_t token = batch.query_indptr()[s];
    const int ranks = 1 << s / 2 % 4;
    switch (s / 2 % 3) {
      case 0:
        AddSingleRow<32>(sequences[s], ranks, token, group, window, seen);
        break;
      case 1:
        AddSingleRow<64>(sequences[s], ranks, token, group, window, seen);
        break;
      default:
        AddSingleRow<128>(sequences[s], ranks, token, group, window, seen);
    }
  }
}

void ExpectEveryKeyOnce(const std::vector<Sequence>& sequences, int32_t group, int32_t window) {
  const Batch batch(sequences);
  const AttentionPlan plan = batch.Plan(group, window);
  Seen seen;
  AddSingleRows(sequences, batch, group, window, &seen);
  for (const AttentionItem& item : plan.wide) AddItem(item, group, window, &seen);
  size_t expected = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (int32_t i = 0; i < sequences[s].rows; ++i) {
      const int32_t position = sequences[s].context - sequences[s].rows + i;
      const int32_t first = window > 0 ? std::max(0, position + 1 - window) : 0;
      for (int32_t head = 0; head < group; ++head) {
        for (int32_t key = first; key <= position; ++key, ++expected) {
          ASSERT_EQ((seen[{batch.query_indptr()[s] + i, head, key}]), 1)
              << "sequence " << s << ", row " << i << ", head " << head << ", key " << key;
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), expected) << "keys that no row should see";
}

TEST(AttentionPlanTest, EveryRowSeesEveryKeyOnce) {
  std::mt19937 random(3);
  for (const int32_t group : {1, 4, 20}) {
    for (const int32_t window : {0, 1, 100, 300, 900}) {
      std::vector<Sequence> sequences;
      for (const int32_t context : {1, 64, 65, 256, 257, 700, 1025}) {
        sequences.push_back({context, 1});
        sequences.push_back(
            {context,
             1 + static_cast<int32_t>(random() % static_cast<uint32_t>(std::min(context, 90)))});
      }
      ExpectEveryKeyOnce(sequences, group, window);
    }
  }
}

TEST(AttentionPlanTest, TilesKeepTheirLimitsAndSingleRowsAreCounted) {
  const Batch batch({{1000, 1}, {1000, 130}, {200, 1}, {513, 1}});
  const AttentionPlan plan = batch.Plan(/*group=*/20, /*window=*/0);
  EXPECT_EQ(plan.num_single_rows, 3);
  ASSERT_FALSE(plan.wide.empty());
  for (const AttentionItem& item : plan.wide) {
    EXPECT_GE(item.num_rows, 1);
    EXPECT_LE(item.num_rows, kWideRows);
    EXPECT_EQ(item.first_key % 64, 0);
    EXPECT_EQ(item.first_block, batch.block_indptr()[1]);
  }
}

void ExpectSplit(int64_t num_units, bool cluster, const DecodeSplit& expected,
                 bool double_blocks = true) {
  const DecodeSplit split = SplitDecode(num_units, /*num_sms=*/132, cluster, double_blocks);
  EXPECT_EQ(split.ranks, expected.ranks) << num_units << " units";
  EXPECT_EQ(split.double_blocks, expected.double_blocks) << num_units << " units";
  EXPECT_EQ(split.blocks_per_sm, expected.blocks_per_sm) << num_units << " units";
}

TEST(AttentionPlanTest, FewDecodeRowsAreSpreadOverTheDevice) {
  ExpectSplit(1, false, {.ranks = kMaxDecodeRanks});
  ExpectSplit(64, false, {.ranks = 4});
  ExpectSplit(128, false, {.ranks = 2});
  ExpectSplit(264, false, {.ranks = 1});
}

TEST(AttentionPlanTest, InClustersTheVeryFewHaveDoubleBlocksOneAnSm) {
  ExpectSplit(1, true, {.ranks = kMaxDecodeRanks, .double_blocks = true, .blocks_per_sm = 1});
  ExpectSplit(8, true, {.ranks = 8, .double_blocks = true, .blocks_per_sm = 1});
  ExpectSplit(16, true, {.ranks = 4, .double_blocks = true, .blocks_per_sm = 1});
  ExpectSplit(32, true, {.ranks = 2, .double_blocks = true, .blocks_per_sm = 1});
  ExpectSplit(66, true, {.ranks = 2, .double_blocks = true, .blocks_per_sm = 1});
  ExpectSplit(67, true, {.ranks = 2, .blocks_per_sm = 2});
  ExpectSplit(132, true, {.ranks = 2, .blocks_per_sm = 2});
  ExpectSplit(133, true, {.ranks = 1, .blocks_per_sm = 2});
  ExpectSplit(264, true, {.ranks = 1, .blocks_per_sm = 2});
  ExpectSplit(265, true, {.ranks = 1});
}

TEST(AttentionPlanTest, WithoutRoomForDoubleBlocksFewRowsHaveTwoBlocksAnSm) {
  for (const auto& [num_units, ranks] : {std::pair{1, 8}, std::pair{32, 8}, std::pair{64, 4}}) {
    ExpectSplit(num_units, true, {.ranks = ranks, .blocks_per_sm = 2}, /*double_blocks=*/false);
  }
}

TEST(AttentionPlanTest, DoubleBlocksFitConsumerDevicesForSmallHeadsOnly) {
  constexpr int kConsumer = 99 * 1024;
  constexpr int kDataCenter = 227 * 1024;
  for (const int group : {1, 4, 16, 40}) {
    for (const bool fp8 : {false, true}) {
      for (const int head_dim : {16, 64, 96, 128, 256}) {
        EXPECT_TRUE(TakesDoubleBlocks(head_dim, group, fp8, kDataCenter)) << head_dim;
      }
      EXPECT_TRUE(TakesDoubleBlocks(64, group, fp8, kConsumer));
      EXPECT_FALSE(TakesDoubleBlocks(128, group, fp8, kConsumer));
      EXPECT_FALSE(TakesDoubleBlocks(256, group, fp8, kConsumer));
    }
  }
  EXPECT_FALSE(TakesDoubleBlocks(20, 1, false, kDataCenter)) << "not whole pieces of 16 bytes";
}

TEST(AttentionPlanTest, ADecodeBlockAndWhatRanksExchangeFitConsumerDevices) {
  for (const int padded_dim : {32, 64, 96, 128, 256}) {
    for (const int element_bytes : {1, 2}) {
      for (int ranks = 1; ranks <= kMaxDecodeRanks; ranks *= 2) {
        EXPECT_LE(DecodeBlockBytes(padded_dim, element_bytes, /*double_block=*/false) +
                      ExchangeBytes(ranks, kNarrowRows, padded_dim) + kDecodeStaticBytes,
                  99 * 1024);
      }
    }
  }
}

TEST(AttentionPlanTest, PaddedBlocksShareAnSmWithAsManyAsWantedAndNoMore) {
  constexpr SharedMemoryLimits kLimits = {
      .of_sm = 228 * 1024, .of_block = 227 * 1024, .reserved = 1024};
  for (const int bytes : {20 * 1024, 74 * 1024, 110 * 1024}) {
    EXPECT_EQ(PadSharedBytes(bytes, 0, kLimits), bytes);
    for (const int blocks : {1, 2}) {
      const int padded = PadSharedBytes(bytes, blocks, kLimits);
      EXPECT_GE(padded, bytes);
      EXPECT_LE(padded, kLimits.of_block - kDecodeStaticBytes);
      EXPECT_GT((blocks + 1) * (padded + kLimits.reserved), kLimits.of_sm);
      if (bytes <= kLimits.of_sm / blocks - kLimits.reserved) {
        EXPECT_LE(blocks * (padded + kLimits.reserved), kLimits.of_sm);
      }
    }
  }
}

TEST(AttentionPlanTest, MoreDecodeRowsThanRunAtOnceAreHalvedWhereBlocksJoinInAClusterOnly) {
  ExpectSplit(396, true, {.ranks = 1});
  ExpectSplit(397, true, {.ranks = 2});
  ExpectSplit(512, true, {.ranks = 2});
  ExpectSplit(512, false, {.ranks = 1});
}

TEST(AttentionPlanTest, PaddingSequencesHaveNoWork) {
  const AttentionPlan plan = Batch({{0, 1}, {40, 1}, {0, 3}}).Plan(4, 0);
  EXPECT_EQ(plan.num_single_rows, 1);
  EXPECT_TRUE(plan.wide.empty());
}

}  // namespace
}  // namespace flashquant::cuda
