// Rows T1 to T3: no code point is split, invalid bytes become U+FFFD by the rule of the header.
#include "engine/tokenizer/incremental_detokenizer.h"

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/tokenizer/tiny_tokenizer.h"

namespace flashquant {
namespace {

const std::string kReplacement = "\xEF\xBF\xBD";

// In the tiny tokenizer the id of a byte is the byte, so text can be forced byte by byte.
std::vector<std::string> Deltas(const std::string& bytes) {
  const auto tokenizer = TinyTokenizer();
  IncrementalDetokenizer detokenizer(tokenizer.get());
  std::vector<std::string> deltas;
  for (const char c : bytes) deltas.push_back(detokenizer.Append(static_cast<unsigned char>(c)));
  deltas.push_back(detokenizer.Flush());
  return deltas;
}

std::string Joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += part;
  return all;
}

TEST(IncrementalDetokenizerTest, CodePointSplitOverFourTokensComesWhole) {
  const std::vector<std::string> deltas = Deltas("a\xF0\x9F\x98\x80z");
  const std::vector<std::string> expected{"a", "", "", "", "\xF0\x9F\x98\x80", "z", ""};
  EXPECT_EQ(deltas, expected);
}

TEST(IncrementalDetokenizerTest, TokensMaySplitACodePointAnywhere) {
  for (const auto& cut : std::vector<std::pair<std::string, std::string>>{
           {"\xF0", "\x9F\x98\x80"}, {"\xF0\x9F", "\x98\x80"}, {"\xF0\x9F\x98", "\x80"}}) {
    const auto tokenizer = MakeFromJson(TinyTokenizerJson(
        {{"\xF0", "\x9F"}, {"\xF0\x9F", "\x98"}, {"\x98", "\x80"}, {"\x9F", "\x98\x80"}}, {}));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    IncrementalDetokenizer detokenizer(tokenizer->get());
    const auto first = (*tokenizer)->TokenId(Spelled(cut.first));
    const auto second = (*tokenizer)->TokenId(Spelled(cut.second));
    ASSERT_TRUE(first && second);
    EXPECT_EQ(detokenizer.Append(*first), "");
    EXPECT_EQ(detokenizer.Append(*second), "\xF0\x9F\x98\x80");
    EXPECT_EQ(detokenizer.Flush(), "");
  }
}

// T2
TEST(IncrementalDetokenizerTest, AnswerCutInsideACodePointEndsWithOneReplacement) {
  const std::vector<std::string> deltas = Deltas("a\xF0\x9F\x98");
  EXPECT_EQ(deltas.back(), kReplacement);
  EXPECT_EQ(Joined(deltas), "a" + kReplacement);
}

TEST(IncrementalDetokenizerTest, StrayByteBecomesOneReplacementAndTheRestIsUnaffected) {
  EXPECT_EQ(Joined(Deltas("a\xFF"
                          "b\xC3\xA9")),
            "a" + kReplacement + "b\xC3\xA9");
  EXPECT_EQ(Joined(Deltas("\x80\xC3\xA9")), kReplacement + "\xC3\xA9");
}

TEST(IncrementalDetokenizerTest, EachMaximalPartOfAnIllFormedSequenceIsOneReplacement) {
  const std::string r = kReplacement;
  const std::vector<std::pair<std::string, std::string>> cases{
      {"\xF0\x9F"
       "A",
       r + "A"},                            // cut short
      {"\xE0\x80\x80", r + r + r},          // overlong: no part of it can start a character
      {"\xED\xA0\x80", r + r + r},          // surrogate
      {"\xF4\x90\x80\x80", r + r + r + r},  // above U+10FFFF
      {"\xC0\xAF", r + r},                  // overlong slash
      {"\xE2\x82\xE2\x82\xAC", r + "\xE2\x82\xAC"},  // starts over inside
  };
  for (const auto& [bytes, text] : cases) EXPECT_EQ(Joined(Deltas(bytes)), text);
}

TEST(IncrementalDetokenizerTest, SpecialTokensAndUnknownIdsAddNothing) {
  const auto tokenizer = TinyTokenizer();
  IncrementalDetokenizer detokenizer(tokenizer.get());
  EXPECT_EQ(detokenizer.Append('a'), "a");
  EXPECT_EQ(detokenizer.Append(*tokenizer->TokenId("<|im_end|>")), "");
  EXPECT_EQ(detokenizer.Append(-1), "");
  EXPECT_EQ(detokenizer.Append(1 << 30), "");
  EXPECT_EQ(detokenizer.Append('b'), "b");
}

TEST(IncrementalDetokenizerTest, SpecialTokenInsideACodePointDoesNotBreakIt) {
  const auto tokenizer = TinyTokenizer();
  IncrementalDetokenizer detokenizer(tokenizer.get());
  EXPECT_EQ(detokenizer.Append(0xC3), "");
  EXPECT_EQ(detokenizer.Append(*tokenizer->TokenId("<|im_start|>")), "");
  EXPECT_EQ(detokenizer.Append(0xA9), "\xC3\xA9");
}

TEST(Utf8RepairTest, OutputDoesNotDependOnWhereTheBytesAreCut) {
  const std::string alphabet = "aZ\x80\x9F\xA0\xBF\xC2\xC3\xE0\xE2\xED\xF0\xF4\xFF";
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    std::string bytes;
    for (int i = 0; i < 12; ++i) bytes += alphabet[random() % alphabet.size()];
    std::string whole;
    Utf8Repair at_once;
    at_once.Append(bytes, &whole);
    at_once.Flush(&whole);
    std::string joined;
    Utf8Repair in_pieces;
    for (size_t pos = 0; pos < bytes.size();) {
      const size_t num_bytes = random() % 4;
      in_pieces.Append(bytes.substr(pos, num_bytes), &joined);
      pos += num_bytes;
    }
    in_pieces.Flush(&joined);
    ASSERT_EQ(joined, whole);
  }
}

}  // namespace
}  // namespace flashquant
