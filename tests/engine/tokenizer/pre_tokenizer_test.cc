// The hand-written splitters against PCRE2 running the published patterns, and the stages around
// them by hand.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/tokenizer/pre_tokenizer.h"

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pcre2.h"

namespace flashquant {
namespace {

using ::testing::ElementsAre;
using Stage = PreTokenizerStage;

const char kGpt2[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const char kLlama3[] =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const char kQwen2[] =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

std::vector<std::string> Split(const std::vector<Stage>& stages, const std::string& text) {
  const auto pre_tokenizer = PreTokenizer::Create(stages);
  EXPECT_TRUE(pre_tokenizer.ok()) << pre_tokenizer.status();
  std::vector<std::string> pieces;
  pre_tokenizer->Split(text, true, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

std::vector<Stage> ByteLevel(SplitPattern pattern, bool add_prefix_space = false) {
  Stage stage;
  stage.pattern = pattern;
  stage.add_prefix_space = add_prefix_space;
  return {stage};
}

// All matches of a regular expression, one after the other.
std::vector<std::string> RegexMatches(const char* regex, const std::string& text) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  const std::unique_ptr<pcre2_code, decltype(&pcre2_code_free)> code(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(regex), PCRE2_ZERO_TERMINATED,
                    PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr),
      &pcre2_code_free);
  EXPECT_NE(code, nullptr);
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
      pcre2_match_data_create(1, nullptr), &pcre2_match_data_free);
  std::vector<std::string> pieces;
  size_t pos = 0;
  while (pos < text.size() && pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                          text.size(), pos, 0, match.get(), nullptr) > 0) {
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match.get());
    pieces.push_back(text.substr(range[0], range[1] - range[0]));
    pos = range[1];
  }
  return pieces;
}

std::string RandomText(std::mt19937* random) {
  // Each kind of character that a pattern asks for. U+180E is left out: PCRE2's \s has it.
  static const std::vector<std::string> kParts{" ",
                                               "  ",
                                               "\n",
                                               "\r",
                                               "\t",
                                               "\xC2\xA0",
                                               "\xE3\x80\x80",
                                               "\xC2\x85",
                                               "a",
                                               "Bc",
                                               "'s",
                                               "'S",
                                               "'ll",
                                               "'LL",
                                               "'re",
                                               "'V",
                                               "e",
                                               "'",
                                               "t",
                                               "1",
                                               "23",
                                               "\xD9\xA3",
                                               "\xC2\xBD",
                                               "!",
                                               "...",
                                               "_",
                                               "\xC3\xA9",
                                               "e\xCC\x81",
                                               "\xE4\xB8\x80",
                                               "\xF0\x9F\x98\x80",
                                               "\xE2\x80\x8D",
                                               "\xC5\xBF"};
  std::string text;
  const size_t num_parts = (*random)() % 12;
  for (size_t i = 0; i < num_parts; ++i) text += kParts[(*random)() % kParts.size()];
  return text;
}

void ExpectSameAsRegex(SplitPattern pattern, const char* regex, unsigned seed) {
  ASSERT_EQ(KnownSplitPattern(regex), pattern);
  std::mt19937 random(seed);
  for (int round = 0; round < 20000; ++round) {
    const std::string text = RandomText(&random);
    ASSERT_EQ(Split(ByteLevel(pattern), text), RegexMatches(regex, text))
        << "seed " << seed << " round " << round;
  }
}

TEST(PreTokenizerTest, Gpt2SplitsAsItsPattern) { ExpectSameAsRegex(SplitPattern::kGpt2, kGpt2, 1); }

TEST(PreTokenizerTest, Llama3SplitsAsItsPattern) {
  ExpectSameAsRegex(SplitPattern::kLlama3, kLlama3, 2);
}

TEST(PreTokenizerTest, Qwen2SplitsAsItsPattern) {
  ExpectSameAsRegex(SplitPattern::kQwen2, kQwen2, 3);
}

TEST(PreTokenizerTest, PatternsAreKnownByTheirExactTextOnly) {
  EXPECT_EQ(KnownSplitPattern(R"(\s+)"), std::nullopt);
  EXPECT_EQ(KnownSplitPattern(""), std::nullopt);
  EXPECT_EQ(KnownSplitPattern(std::string(kGpt2) + " "), std::nullopt);
}

TEST(PreTokenizerTest, DigitsAreCutBeforeThePatternSeesThem) {
  Stage digits;
  digits.kind = Stage::Kind::kDigits;
  digits.individual_digits = true;
  std::vector<Stage> stages = ByteLevel(SplitPattern::kGpt2);
  stages.insert(stages.begin(), digits);
  EXPECT_THAT(Split(stages, "in  2024 a"), ElementsAre("in", "  ", "2", "0", "2", "4", " a"));
  stages[0].individual_digits = false;
  EXPECT_THAT(Split(stages, "in  2024 a"), ElementsAre("in", "  ", "2024", " a"));
}

TEST(PreTokenizerTest, PrefixSpaceIsAddedWhereNoneIs) {
  EXPECT_THAT(Split(ByteLevel(SplitPattern::kGpt2, true), "a b"), ElementsAre(" a", " b"));
  EXPECT_THAT(Split(ByteLevel(SplitPattern::kGpt2, true), " a"), ElementsAre(" a"));
  EXPECT_THAT(Split(ByteLevel(SplitPattern::kGpt2, true), ""), ElementsAre());
}

TEST(PreTokenizerTest, WithoutPatternTheTextStaysWhole) {
  EXPECT_THAT(Split(ByteLevel(SplitPattern::kNone), "a b\n1"), ElementsAre("a b\n1"));
}

TEST(PreTokenizerTest, BytesThatAreNotUtf8CountAsPunctuation) {
  EXPECT_THAT(Split(ByteLevel(SplitPattern::kGpt2), "ab\xFF\xC3 c"),
              ElementsAre("ab", "\xFF\xC3", " c"));
}

TEST(PreTokenizerTest, TooManyStagesAreRefused) {
  const std::vector<Stage> stages(PreTokenizer::kMaxStages + 1);
  EXPECT_EQ(PreTokenizer::Create(stages).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace flashquant
