// Which end wins, what it says, and how much text it leaves.
#include "engine/sampling/stop_checker.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokenizer/tokenizer.h"
#include "gtest/gtest.h"

namespace flashquant {
namespace {

// Token i stands for texts[i]; the last one is special.
class ListTokenizer final : public Tokenizer {
 public:
  explicit ListTokenizer(std::vector<std::string> texts) : texts_(std::move(texts)) {}
  std::vector<int32_t> Encode(std::string_view, SpecialText) const override { return {}; }
  std::string_view TokenBytes(int32_t id) const override { return texts_[static_cast<size_t>(id)]; }
  bool IsSpecial(int32_t id) const override { return id + 1 == vocab_size(); }
  std::optional<int32_t> TokenId(std::string_view) const override { return std::nullopt; }
  int32_t vocab_size() const override { return static_cast<int32_t>(texts_.size()); }
  std::optional<int32_t> prompt_bos() const override { return std::nullopt; }
  std::optional<int32_t> bos() const override { return std::nullopt; }
  std::optional<int32_t> eos() const override { return vocab_size() - 1; }

 private:
  const std::vector<std::string> texts_;
};

const ListTokenizer& Letters() {
  static const ListTokenizer tokenizer({"a", "b", "ab", "cab", "d", "xyz", "<eos>"});
  return tokenizer;
}
constexpr int32_t kEosId = 6;

struct Taken {
  std::optional<StopVerdict> verdict;
  size_t num_tokens = 0;  // taken until the verdict
};

Taken Feed(const StopConditions& stop, const std::vector<int32_t>& tokens,
           const Tokenizer* tokenizer = &Letters()) {
  const std::vector<int32_t> eos = {kEosId};
  StopChecker checker(&stop, eos, tokenizer);
  Taken run;
  for (int32_t token : tokens) {
    ++run.num_tokens;
    run.verdict = checker.Accept(token);
    if (run.verdict) break;
  }
  return run;
}

StopConditions Limit(int32_t max_output_tokens) {
  StopConditions stop;
  stop.max_output_tokens = max_output_tokens;
  return stop;
}

TEST(StopCheckerTest, TheEndTokenEndsTheAnswerAndIsNotText) {
  const Taken run = Feed(Limit(10), {0, 2, kEosId, 1});
  ASSERT_TRUE(run.verdict);
  EXPECT_EQ(run.num_tokens, 3u);
  EXPECT_EQ(run.verdict->reason, FinishReason::kEos);
  EXPECT_EQ(run.verdict->matched_token, kEosId);
  EXPECT_EQ(run.verdict->text_bytes, 3);
}

// T11
TEST(StopCheckerTest, IgnoreEosGoesOnToTheLimit) {
  StopConditions stop = Limit(4);
  stop.ignore_eos = true;
  const Taken run = Feed(stop, {0, kEosId, kEosId, 1});
  ASSERT_TRUE(run.verdict);
  EXPECT_EQ(run.verdict->reason, FinishReason::kLength);
  EXPECT_EQ(run.num_tokens, 4u);
  EXPECT_EQ(run.verdict->text_bytes, std::nullopt);
}

TEST(StopCheckerTest, AStopTokensTextCountsOnlyWhenAskedFor) {
  StopConditions stop = Limit(10);
  stop.token_ids = {4};
  Taken run = Feed(stop, {2, 4});
  ASSERT_TRUE(run.verdict);
  EXPECT_EQ(run.verdict->reason, FinishReason::kStopToken);
  EXPECT_EQ(run.verdict->matched_token, 4);
  EXPECT_EQ(run.verdict->text_bytes, 2);
  stop.include_stop = true;
  EXPECT_EQ(Feed(stop, {2, 4}).verdict->text_bytes, std::nullopt);
}

TEST(StopCheckerTest, AStopStringMaySpanTokensAndEndInsideOne) {
  StopConditions stop = Limit(10);
  stop.sequences = {"never", "bca"};
  const Taken run = Feed(stop, {0, 1, 3, 0});  // a b cab
  ASSERT_TRUE(run.verdict);
  EXPECT_EQ(run.num_tokens, 3u);
  EXPECT_EQ(run.verdict->reason, FinishReason::kStopSequence);
  EXPECT_EQ(run.verdict->matched_sequence, 1);
  EXPECT_EQ(run.verdict->text_bytes, 1);
  stop.include_stop = true;
  EXPECT_EQ(Feed(stop, {0, 1, 3, 0}).verdict->text_bytes, 4);
}

// T8
TEST(StopCheckerTest, AStopStringWinsOverTheLengthInTheSameToken) {
  StopConditions stop = Limit(2);
  stop.sequences = {"b"};
  EXPECT_EQ(Feed(stop, {0, 1}).verdict->reason, FinishReason::kStopSequence);
  EXPECT_EQ(Feed(stop, {0, 0}).verdict->reason, FinishReason::kLength);
}

// T6
TEST(StopCheckerTest, TheEarliestEndWinsThenTheLonger) {
  StopConditions stop = Limit(10);
  stop.sequences = {"xyz", "y", "xy"};
  const Taken run = Feed(stop, {5});
  ASSERT_TRUE(run.verdict);
  EXPECT_EQ(run.verdict->matched_sequence, 2);
  EXPECT_EQ(run.verdict->text_bytes, 0);
}

TEST(StopCheckerTest, NothingEndsTheAnswerBeforeTheLeastNumberOfTokens) {
  StopConditions stop = Limit(10);
  stop.min_output_tokens = 3;
  stop.sequences = {"b"};
  stop.token_ids = {4};
  EXPECT_EQ(Feed(stop, {1, 4, kEosId}).num_tokens, 3u);
  EXPECT_EQ(Feed(stop, {1, 4, kEosId}).verdict->reason, FinishReason::kEos);
  EXPECT_EQ(Feed(stop, {1, 1, 1}).verdict->reason, FinishReason::kStopSequence);
  EXPECT_EQ(Feed(stop, {1, 1, 1}).verdict->text_bytes, 2);
  EXPECT_FALSE(Feed(stop, {kEosId, 1}).verdict.has_value());
}

TEST(StopCheckerTest, TheContextsEndIsNamedWhenTheClientSetNoLimit) {
  StopConditions stop = Limit(2);
  stop.limited_by_context = true;
  EXPECT_EQ(Feed(stop, {0, 0}).verdict->reason, FinishReason::kContextLength);
}

TEST(StopCheckerTest, WorksOnIdsAloneWithoutATokenizer) {
  StopConditions stop = Limit(5);
  stop.token_ids = {4};
  EXPECT_EQ(Feed(stop, {0, 4}, nullptr).verdict->reason, FinishReason::kStopToken);
  EXPECT_EQ(Feed(stop, {0, kEosId}, nullptr).verdict->reason, FinishReason::kEos);
  EXPECT_EQ(Feed(stop, {0, 0, 0, 0, 0}, nullptr).verdict->reason, FinishReason::kLength);
}

}  // namespace
}  // namespace flashquant
