// The attention plan: every row sees every one of its keys once, and is cut the same way in any
// batch.
#include "kernels/cuda/backend/paged_attention/plan.h"

#include <cstdint>
#include <map>
#include <random>
#include <tuple>
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

void ExpectEveryKeyOnce(const std::vector<Sequence>& sequences, int32_t group, int32_t window) {
  const Batch batch(sequences);
  const AttentionPlan plan = batch.Plan(group, window);
  Seen seen;
  for (const AttentionItem& item : plan.narrow) AddItem(item, group, window, &seen);
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
  for (const int32_t group : {1, 3, 4, 16, 20}) {
    for (const int32_t window : {0, 1, 100, 256, 300}) {
      std::vector<Sequence> sequences;
      for (const int32_t context : {1, 64, 65, 256, 257, 700}) {
        sequences.push_back({context, 1});
        sequences.push_back(
            {context,
             1 + static_cast<int32_t>(random() % static_cast<uint32_t>(std::min(context, 90)))});
      }
      ExpectEveryKeyOnce(sequences, group, window);
    }
  }
}

TEST(AttentionPlanTest, TilesAndPartsKeepTheirLimits) {
  const Batch batch({{1000, 1}, {1000, 130}, {200, 1}, {513, 1}});
  const AttentionPlan plan = batch.Plan(/*group=*/20, /*window=*/0);
  for (const AttentionItem& item : plan.narrow) {
    EXPECT_GE(item.num_rows, 1);
    EXPECT_LE(item.num_rows, kNarrowRows);
    EXPECT_EQ(item.first_key % kSplitKeys, 0);
    EXPECT_LE(item.end_key - item.first_key, kSplitKeys);
  }
  for (const AttentionItem& item : plan.wide) {
    EXPECT_GE(item.num_rows, 1);
    EXPECT_LE(item.num_rows, kWideRows);
    EXPECT_EQ(item.first_key % 64, 0);
    EXPECT_EQ(item.first_block, batch.block_indptr()[1]);
    EXPECT_EQ(item.partial, kWholeRow);
  }
}

TEST(AttentionPlanTest, JoinsNameEachPartialOnceInKeyOrder) {
  const Batch batch({{1000, 1}, {200, 1}, {513, 1}, {90, 40}});
  const AttentionPlan plan = batch.Plan(/*group=*/20, /*window=*/600);
  std::vector<const AttentionItem*> of_partial(static_cast<size_t>(plan.num_partials));
  for (const AttentionItem& item : plan.narrow) {
    if (item.partial == kWholeRow) continue;
    const AttentionItem*& place = of_partial.at(static_cast<size_t>(item.partial));
    EXPECT_EQ(place, nullptr);
    place = &item;
  }
  int32_t joined = 0;
  for (const AttentionJoin& join : plan.joins) {
    EXPECT_GE(join.num_partials, 2);
    for (int32_t i = 0; i < join.num_partials; ++i) {
      const AttentionItem* item = of_partial.at(static_cast<size_t>(join.first_partial + i));
      ASSERT_NE(item, nullptr);
      EXPECT_EQ(item->first_token, join.token);
      EXPECT_EQ(item->first_row, join.first_row);
      EXPECT_EQ(item->num_rows, join.num_rows);
      if (i > 0) {
        EXPECT_EQ(item[0].first_key,
                  of_partial[static_cast<size_t>(join.first_partial + i - 1)]->end_key);
      }
      ++joined;
    }
  }
  EXPECT_EQ(joined, plan.num_partials);
  EXPECT_GT(joined, 0);
}

TEST(AttentionPlanTest, ASequenceIsCutTheSameWayInAnyBatch) {
  const AttentionPlan alone = Batch({{900, 1}}).Plan(4, 0);
  const AttentionPlan together = Batch({{64, 64}, {900, 1}, {300, 1}}).Plan(4, 0);
  ASSERT_GE(together.narrow.size(), alone.narrow.size());
  for (size_t i = 0; i < alone.narrow.size(); ++i) {
    EXPECT_EQ(together.narrow[i].first_key, alone.narrow[i].first_key);
    EXPECT_EQ(together.narrow[i].end_key, alone.narrow[i].end_key);
    EXPECT_EQ(together.narrow[i].first_token, 64);
  }
}

}  // namespace
}  // namespace flashquant::cuda
