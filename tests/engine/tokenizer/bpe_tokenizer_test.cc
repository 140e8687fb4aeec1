// Encoding with a tokenizer small enough to check by hand: merges, added tokens and their flags,
// any bytes; rows R7, R42 and R43. Real vocabularies are in tokenizer_golden_test.cc.
#include "engine/tokenizer/bpe_tokenizer.h"

#include <pthread.h>

#include <ctime>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/tokenizer/tiny_tokenizer.h"

namespace flashquant {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int32_t kThe = 258;  // " the"
constexpr int32_t kImStart = 261;
constexpr int32_t kImEnd = 262;

std::string Decode(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  std::string text;
  for (const int32_t id : ids) text += tokenizer.TokenBytes(id);
  return text;
}

std::vector<int32_t> Plain(const Tokenizer& tokenizer, const std::string& text) {
  return tokenizer.Encode(text, SpecialText::kPlain);
}

std::vector<int32_t> Recognised(const Tokenizer& tokenizer, const std::string& text) {
  return tokenizer.Encode(text, SpecialText::kRecognised);
}

TEST(BpeTokenizerTest, MergesByRankAndLeftmostAmongEquals) {
  const auto tokenizer = TinyTokenizer();
  EXPECT_THAT(Plain(*tokenizer, "the the"), ElementsAre(257, kThe));
  EXPECT_THAT(Plain(*tokenizer, "aaa"), ElementsAre(259, 'a'));
  EXPECT_THAT(Plain(*tokenizer, "aaaaaaa"), ElementsAre(260, 259, 'a'));
  EXPECT_THAT(Plain(*tokenizer, ""), IsEmpty());
}

// BPE as its definition says: find the best pair in the whole list, merge it, start again.
std::vector<std::string> NaiveBpe(const std::string& text,
                                  const std::vector<std::pair<std::string, std::string>>& merges) {
  std::vector<std::string> symbols;
  for (const char c : text) symbols.emplace_back(1, c);
  for (;;) {
    size_t best_rank = merges.size();
    size_t best = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      for (size_t rank = 0; rank < best_rank; ++rank) {
        if (merges[rank] == std::pair(symbols[i], symbols[i + 1])) {
          best_rank = rank;
          best = i;
        }
      }
    }
    if (best_rank == merges.size()) return symbols;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(BpeTokenizerTest, MergesAsTheNaiveDefinitionForRandomVocabularies) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::string> tokens{"a", "b", "c"};
    std::vector<std::pair<std::string, std::string>> merges;
    for (int i = 0; i < 12; ++i) {
      const std::string& left = tokens[random() % tokens.size()];
      const std::string& right = tokens[random() % tokens.size()];
      std::string merged = left + right;
      if (std::find(tokens.begin(), tokens.end(), merged) != tokens.end()) continue;
      merges.emplace_back(left, right);
      tokens.push_back(std::move(merged));
    }
    const auto tokenizer = MakeFromJson(TinyTokenizerJson(merges, {}));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (int i = 0; i < 20; ++i) {
      std::string text;
      const size_t num_bytes = 1 + random() % 30;
      while (text.size() < num_bytes) text += static_cast<char>('a' + random() % 3);
      std::vector<std::string> pieces;
      for (const int32_t id : Plain(**tokenizer, text)) {
        pieces.emplace_back((*tokenizer)->TokenBytes(id));
      }
      ASSERT_EQ(pieces, NaiveBpe(text, merges)) << "round " << round << " text " << text;
    }
  }
}

TEST(BpeTokenizerTest, SpecialTextIsPlainUnlessRecognised) {
  const auto tokenizer = TinyTokenizer();
  EXPECT_THAT(Recognised(*tokenizer, "<|im_start|>a<|im_end|>"),
              ElementsAre(kImStart, 'a', kImEnd));
  const std::vector<int32_t> plain = Plain(*tokenizer, "<|im_start|>");
  EXPECT_EQ(plain.size(), 12u);
  EXPECT_THAT(plain, ::testing::Not(::testing::Contains(::testing::Ge(kImStart))));
}

TEST(BpeTokenizerTest, IgnoreMergesNeverMakesAControlTokenOfPlainText) {
  nlohmann::json json = TinyTokenizerJson({}, {"secret"});
  json["model"]["vocab"]["secret"] = 256;
  json["model"]["vocab"]["token"] = 257;
  json["model"]["ignore_merges"] = true;
  const auto tokenizer = MakeFromJson(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(Plain(**tokenizer, "token"), ElementsAre(257));
  EXPECT_EQ(Plain(**tokenizer, "secret").size(), 6u);
  EXPECT_THAT(Recognised(**tokenizer, "secret"), ElementsAre(256));
}

// A tokenizer with the added tokens "ab" (256) and "abc" (257) changed by `flags`.
std::unique_ptr<Tokenizer> WithFlags(const nlohmann::json& flags) {
  nlohmann::json json = TinyTokenizerJson({}, {"ab", "abc"});
  for (nlohmann::json& token : json["added_tokens"]) token.update(flags);
  auto tokenizer = MakeFromJson(json);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

TEST(BpeTokenizerTest, LongestAddedTokenWins) {
  const auto tokenizer = WithFlags(nlohmann::json::object());
  EXPECT_THAT(Recognised(*tokenizer, "abcab"), ElementsAre(257, 256));
}

TEST(BpeTokenizerTest, SingleWordTokensNeedNoWordBesideThem) {
  const auto tokenizer = WithFlags({{"single_word", true}});
  EXPECT_THAT(Recognised(*tokenizer, "abc-ab"), ElementsAre(257, '-', 256));
  EXPECT_THAT(Recognised(*tokenizer, "abcd"), ElementsAre('a', 'b', 'c', 'd'));
  EXPECT_THAT(Recognised(*tokenizer, "_ab"), ElementsAre('_', 'a', 'b'));
}

TEST(BpeTokenizerTest, StrippingTokensTakeTheWhiteSpaceBesideThem) {
  EXPECT_THAT(Recognised(*WithFlags({{"lstrip", true}}), "x \n ab y"),
              ElementsAre('x', 256, ' ', 'y'));
  EXPECT_THAT(Recognised(*WithFlags({{"rstrip", true}}), "x ab \xC2\xA0y"),
              ElementsAre('x', ' ', 256, 'y'));
}

TEST(BpeTokenizerTest, NormalizedTokensAreSearchedAfterTheOthers) {
  nlohmann::json json = TinyTokenizerJson({}, {"abc", "bc"});
  json["added_tokens"][0]["normalized"] = true;
  const auto tokenizer = MakeFromJson(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(Recognised(**tokenizer, "abc"), ElementsAre('a', 257));
}

TEST(BpeTokenizerTest, AnyBytesComeBack) {
  const auto tokenizer = TinyTokenizer();
  std::mt19937 random(9);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    const size_t num_bytes = random() % 20;
    for (size_t i = 0; i < num_bytes; ++i) bytes += static_cast<char>(random());
    ASSERT_EQ(Decode(*tokenizer, Plain(*tokenizer, bytes)), bytes);
    ASSERT_EQ(Decode(*tokenizer, Recognised(*tokenizer, bytes)), bytes);
  }
}

TEST(BpeTokenizerTest, AllCodePointsComeBack) {
  const auto tokenizer = TinyTokenizer();
  std::string text;
  for (uint32_t c = 0; c <= kMaxCodePoint; ++c) {
    if (c < 0xD800 || c > 0xDFFF) AppendUtf8(c, &text);
  }
  EXPECT_EQ(Decode(*tokenizer, Plain(*tokenizer, text)), text);
}

TEST(BpeTokenizerTest, ByteWithoutTokenIsDropped) {
  nlohmann::json json = TinyTokenizerJson({}, {});
  json["model"]["vocab"].erase(SpelledByte(255));  // the greatest id: leaves no hole
  const auto tokenizer = MakeFromJson(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(Plain(**tokenizer,
                    "a\xFF"
                    "b"),
              ElementsAre('a', 'b'));
}

// Runs `work` on a thread whose stack is too small for one frame per character of 1 MiB.
void RunWithSmallStack(const std::function<void()>& work) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, size_t{512} << 10);
  pthread_t thread{};
  ASSERT_EQ(pthread_create(
                &thread, &attributes,
                [](void* argument) -> void* {
                  (*static_cast<const std::function<void()>*>(argument))();
                  return nullptr;
                },
                const_cast<std::function<void()>*>(&work)),
            0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

std::string Repeated(const std::string& unit) {
  std::string text;
  while (text.size() < (size_t{1} << 20)) text += unit;
  return text;
}

TEST(BpeTokenizerTest, MebibyteOfOneKindTakesUnderASecondAndLittleStack) {
  const auto tokenizer = TinyTokenizer();
  for (const std::string& unit :
       std::vector<std::string>{"a", " ", "\n", "1", "\xF0\x9F\x98\x80", "a1 !", "'", "\xFF",
                                "<|im_start|>", "<|im_start", " \n", "the"}) {
    const std::string text = Repeated(unit);
    RunWithSmallStack([&] {
      const std::clock_t start = std::clock();  // CPU time: other processes do not count
      const std::vector<int32_t> ids = Recognised(*tokenizer, text);
      const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
      EXPECT_EQ(Decode(*tokenizer, ids), text);
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
      EXPECT_LT(seconds, 1.0) << "unit " << unit;
#endif
      ::testing::Test::RecordProperty("seconds", std::to_string(seconds));
    });
  }
}

TEST(BpeTokenizerTest, TokensHaveBytesContentAndKind) {
  const auto tokenizer = TinyTokenizer();
  EXPECT_EQ(tokenizer->vocab_size(), 264);
  EXPECT_EQ(tokenizer->TokenBytes(kThe), " the");
  EXPECT_EQ(tokenizer->TokenBytes(kImEnd), "<|im_end|>");
  EXPECT_EQ(tokenizer->TokenBytes(-1), "");
  EXPECT_EQ(tokenizer->TokenBytes(264), "");
  EXPECT_TRUE(tokenizer->IsSpecial(kImEnd));
  EXPECT_FALSE(tokenizer->IsSpecial(kThe));
  EXPECT_EQ(tokenizer->TokenId("<|im_end|>"), kImEnd);
  EXPECT_EQ(tokenizer->TokenId("<|none|>"), std::nullopt);
}

}  // namespace
}  // namespace flashquant
