// Rows T4, T5, T7 to T9 for what a client sees: nothing of a stop sequence is ever sent.
#include "engine/tokenizer/text_stream.h"

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/tokenizer/tiny_tokenizer.h"

namespace flashquant {
namespace {

StopConditions StopAt(std::vector<std::string> sequences) {
  StopConditions stop;
  stop.max_output_tokens = 100;
  stop.sequences = std::move(sequences);
  return stop;
}

// Feeds bytes as one-byte tokens and joins the deltas.
std::string AppendBytes(TextStream* stream, const std::string& bytes) {
  std::string text;
  for (const char c : bytes) text += stream->Append(static_cast<unsigned char>(c));
  return text;
}

TEST(TextStreamTest, NothingOfAStopSequenceIsSent) {
  const auto tokenizer = TinyTokenizer();
  TextStream stream(tokenizer.get(), StopAt({"</stop>"}));
  EXPECT_EQ(AppendBytes(&stream, "story</stop>"), "story");
  EXPECT_EQ(AppendBytes(&stream, "past"), "");
  EXPECT_EQ(stream.Finish(5), "");
}

TEST(TextStreamTest, NearMissIsSentLate) {
  const auto tokenizer = TinyTokenizer();
  TextStream stream(tokenizer.get(), StopAt({"</stop>"}));
  EXPECT_EQ(AppendBytes(&stream, "a</sto"), "a");
  EXPECT_EQ(AppendBytes(&stream, "n"), "</ston");
  EXPECT_EQ(AppendBytes(&stream, "<"), "");
  EXPECT_EQ(stream.Finish(std::nullopt), "<");
}

TEST(TextStreamTest, IncludedStopIsSentOnce) {
  const auto tokenizer = TinyTokenizer();
  StopConditions stop = StopAt({"END"});
  stop.include_stop = true;
  TextStream stream(tokenizer.get(), stop);
  EXPECT_EQ(AppendBytes(&stream, "xENDy"), "xEND");
  EXPECT_EQ(stream.Finish(4), "");
}

TEST(TextStreamTest, StopMayStartAndEndInsideTokens) {
  const auto tokenizer = TinyTokenizer();
  const int32_t the = *tokenizer->TokenId(Spelled(" the"));
  TextStream stream(tokenizer.get(), StopAt({"e t"}));
  EXPECT_EQ(stream.Append(the), " th");
  EXPECT_EQ(stream.Append(the), "");
  EXPECT_EQ(stream.Finish(3), "");
}

TEST(TextStreamTest, StopBeforeTheLeastNumberOfTokensIsText) {
  const auto tokenizer = TinyTokenizer();
  StopConditions stop = StopAt({"ab"});
  stop.min_output_tokens = 3;
  TextStream stream(tokenizer.get(), stop);
  EXPECT_EQ(AppendBytes(&stream, "ab"), "ab");
  EXPECT_EQ(AppendBytes(&stream, "ab"), "");
  EXPECT_EQ(stream.Finish(2), "");
}

TEST(TextStreamTest, TextOfAStopTokenWaitsForTheEngine) {
  const auto tokenizer = TinyTokenizer();
  StopConditions stop = StopAt({});
  stop.token_ids = {'!'};
  TextStream cut(tokenizer.get(), stop);
  EXPECT_EQ(AppendBytes(&cut, "hi!"), "hi");
  EXPECT_EQ(cut.Finish(2), "");
  TextStream kept(tokenizer.get(), stop);
  EXPECT_EQ(AppendBytes(&kept, "hi!"), "hi");
  EXPECT_EQ(kept.Finish(std::nullopt), "!");
}

TEST(TextStreamTest, EndTokensThatAreTextWaitUnlessEosIsIgnored) {
  const auto tokenizer = TinyTokenizer();
  TextStream stream(tokenizer.get(), StopAt({}), {'.'});
  EXPECT_EQ(AppendBytes(&stream, "a."), "a");
  StopConditions ignoring = StopAt({});
  ignoring.ignore_eos = true;
  TextStream going_on(tokenizer.get(), ignoring, {'.'});
  EXPECT_EQ(AppendBytes(&going_on, "a."), "a.");
}

TEST(TextStreamTest, CutInsideACodePointEndsWithOneReplacement) {
  const auto tokenizer = TinyTokenizer();
  TextStream stream(tokenizer.get(), StopAt({}));
  EXPECT_EQ(AppendBytes(&stream, "a\xE2\x82"), "a");
  EXPECT_EQ(stream.Finish(std::nullopt), "\xEF\xBF\xBD");
}

TEST(TextStreamTest, StopSequenceOfSeveralByteCharactersLeavesValidText) {
  const auto tokenizer = TinyTokenizer();
  TextStream stream(tokenizer.get(), StopAt({"\xE2\x82\xAC"}));
  // U+20AB shares two bytes with the stop, U+20AC.
  EXPECT_EQ(AppendBytes(&stream,
                        "1\xE2\x82\xAB"
                        "2\xE2\x82\xAC"),
            "1\xE2\x82\xAB"
            "2");
  EXPECT_EQ(stream.Finish(5), "");
}

TEST(TextStreamTest, JoinedDeltasAreTheAnswerUpToTheStop) {
  const auto tokenizer = TinyTokenizer();
  std::mt19937 random(5);
  for (int round = 0; round < 3000; ++round) {
    std::string answer;
    for (int i = 0; i < 20; ++i) answer += static_cast<char>('a' + random() % 2);
    const std::string sequence = answer.substr(random() % 15, 1 + random() % 5);
    const size_t begin = answer.find(sequence);
    TextStream stream(tokenizer.get(), StopAt({sequence}));
    std::string text;
    for (const int32_t id : tokenizer->Encode(answer, SpecialText::kPlain)) {
      text += stream.Append(id);
    }
    text += stream.Finish(static_cast<int64_t>(begin));
    ASSERT_EQ(text, answer.substr(0, begin));
  }
}

}  // namespace
}  // namespace flashquant
