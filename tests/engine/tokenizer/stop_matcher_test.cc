// Rows T4 to T9 against hand-made cases and a naive search on the joined text.
#include "engine/tokenizer/stop_matcher.h"

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/reference_stop_match.h"

namespace flashquant {
namespace {

TEST(StopMatcherTest, FindsASequenceAcrossSevenPieces) {
  const std::vector<std::string> sequences{"</stop>"};
  StopMatcher matcher(sequences);
  EXPECT_EQ(matcher.Feed("text <"), std::nullopt);
  EXPECT_EQ(matcher.held_back(), 1);
  for (const char* piece : {"/", "s", "t", "o", "p"}) EXPECT_EQ(matcher.Feed(piece), std::nullopt);
  EXPECT_EQ(matcher.held_back(), 6);
  EXPECT_EQ(matcher.Feed("> more"), (StopMatch{0, 5, 12}));
}

TEST(StopMatcherTest, NearMissIsNoLongerHeldBack) {
  const std::vector<std::string> sequences{"</stop>"};
  StopMatcher matcher(sequences);
  EXPECT_EQ(matcher.Feed("</sto"), std::nullopt);
  EXPECT_EQ(matcher.held_back(), 5);
  EXPECT_EQ(matcher.Feed("ne"), std::nullopt);
  EXPECT_EQ(matcher.held_back(), 0);
}

TEST(StopMatcherTest, EarliestEndWinsThenTheLonger) {
  const std::vector<std::string> prefix{"abcd", "ab"};
  EXPECT_EQ(StopMatcher(prefix).Feed("xabcd"), (StopMatch{1, 1, 3}));
  const std::vector<std::string> suffix{"cd", "abcd", "d"};
  EXPECT_EQ(StopMatcher(suffix).Feed("xabcd"), (StopMatch{1, 1, 5}));
  const std::vector<std::string> same{"ab", "ab"};
  EXPECT_EQ(StopMatcher(same).Feed("ab"), (StopMatch{0, 0, 2}));
}

TEST(StopMatcherTest, NothingMatchesAfterTheMatch) {
  const std::vector<std::string> sequences{"ab"};
  StopMatcher matcher(sequences);
  EXPECT_NE(matcher.Feed("ab"), std::nullopt);
  EXPECT_EQ(matcher.Feed("ab"), std::nullopt);
  EXPECT_EQ(matcher.num_bytes(), 4);
  EXPECT_EQ(matcher.held_back(), 0);
}

TEST(StopMatcherTest, MatchThatDoesNotCountMayOverlapTheOneThatDoes) {
  const std::vector<std::string> sequences{"aa"};
  StopMatcher matcher(sequences);
  EXPECT_EQ(matcher.Feed("aa", /*counts=*/false), std::nullopt);
  EXPECT_EQ(matcher.held_back(), 1);
  EXPECT_EQ(matcher.Feed("a"), (StopMatch{0, 1, 3}));
}

TEST(StopMatcherTest, WithoutSequencesNothingIsHeld) {
  StopMatcher none({});
  EXPECT_EQ(none.Feed("anything"), std::nullopt);
  EXPECT_EQ(none.held_back(), 0);
  const std::vector<std::string> empty{""};
  StopMatcher matcher(empty);
  EXPECT_EQ(matcher.Feed("anything"), std::nullopt);
  EXPECT_EQ(matcher.held_back(), 0);
}

TEST(StopMatcherTest, AgreesWithANaiveSearchForAnyCut) {
  std::mt19937 random(11);
  int num_matches = 0;
  for (int round = 0; round < 20000; ++round) {
    const auto word = [&](size_t max_bytes) {
      std::string s;
      const size_t num_bytes = 1 + random() % max_bytes;
      for (size_t i = 0; i < num_bytes; ++i) s += static_cast<char>('a' + random() % 3);
      return s;
    };
    std::vector<std::string> sequences;
    const size_t num_sequences = 1 + random() % 8;
    for (size_t i = 0; i < num_sequences; ++i) sequences.push_back(word(6));
    const std::string text = word(24);
    StopMatcher matcher(sequences);
    std::optional<StopMatch> match;
    size_t pos = 0;
    while (pos < text.size() && !match) {
      const size_t num_bytes = std::min(random() % 4, text.size() - pos);
      match = matcher.Feed(text.substr(pos, num_bytes));
      pos += num_bytes;
      if (!match) {
        ASSERT_EQ(matcher.held_back(), ReferenceHeldBack(text.substr(0, pos), sequences));
      }
    }
    ASSERT_EQ(match, ReferenceStopMatch(text, sequences)) << "round " << round << " text " << text;
    num_matches += match ? 1 : 0;
  }
  EXPECT_GT(num_matches, 1000);
  EXPECT_LT(num_matches, 19900);
}

}  // namespace
}  // namespace flashquant
