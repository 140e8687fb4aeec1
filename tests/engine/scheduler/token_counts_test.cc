// Which tokens count for which penalty, against counting by hand.
#include "engine/scheduler/token_counts.h"

#include <map>
#include <random>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashquant {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;

std::vector<std::pair<int32_t, int32_t>> Entries(const TokenCounts& counts) {
  std::vector<std::pair<int32_t, int32_t>> result;
  for (const TokenCount& entry : counts.entries()) {
    result.emplace_back(entry.token_id, entry.num_outputs);
  }
  return result;
}

SamplingParams Repetition() {
  SamplingParams sampling;
  sampling.repetition_penalty = 1.2f;
  return sampling;
}

TEST(TokenCountsTest, RepetitionPenaltyIsForPromptAndAnswer) {
  TokenCounts counts(Repetition(), std::vector<int32_t>{7, 3, 7});
  EXPECT_THAT(Entries(counts), ElementsAre(Pair(3, 0), Pair(7, 0)));
  counts.AddOutput(7);
  counts.AddOutput(5);
  counts.AddOutput(7);
  EXPECT_THAT(Entries(counts), ElementsAre(Pair(3, 0), Pair(5, 1), Pair(7, 2)));
}

TEST(TokenCountsTest, PresenceAndFrequencyPenaltiesAreForTheAnswerAlone) {
  for (const bool presence : {true, false}) {
    SamplingParams sampling;
    (presence ? sampling.presence_penalty : sampling.frequency_penalty) = -0.5f;
    TokenCounts counts(sampling, std::vector<int32_t>{7, 3, 7});
    EXPECT_THAT(Entries(counts), IsEmpty());
    counts.AddOutput(7);
    EXPECT_THAT(Entries(counts), ElementsAre(Pair(7, 1)));
  }
}

TEST(TokenCountsTest, NothingIsKeptWithoutPenalties) {
  TokenCounts counts({}, std::vector<int32_t>{7, 3, 7});
  counts.AddOutput(7);
  EXPECT_THAT(Entries(counts), IsEmpty());
}

TEST(TokenCountsTest, LongAnswersCountLikeAMap) {
  std::mt19937 random(5);
  std::vector<int32_t> prompt;
  std::map<int32_t, int32_t> expected;
  for (int i = 0; i < 500; ++i) {
    prompt.push_back(static_cast<int32_t>(random() % 1000));
    expected[prompt.back()];
  }
  TokenCounts counts(Repetition(), prompt);
  for (int i = 0; i < 2000; ++i) {
    const auto id = static_cast<int32_t>(random() % 1000);
    counts.AddOutput(id);
    ++expected[id];
  }
  EXPECT_EQ(Entries(counts),
            (std::vector<std::pair<int32_t, int32_t>>(expected.begin(), expected.end())));
}

}  // namespace
}  // namespace flashquant
