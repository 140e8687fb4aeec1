// Normalizers by themselves, and in a small vocabulary of characters with a fallback to bytes, as
// Llama-2's is. Real vocabularies are in tokenizer_golden_test.cc.
#include "engine/tokenizer/normalizer.h"

#include <ctime>
#include <string>

#include "engine/tokenizer/tokenizer_loader.h"
#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace flashquant {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kMark[] = "\u2581";

TEST(NormalizerTest, NfcComposesAndKeepsWhatIsNotUtf8) {
  EXPECT_EQ(ComposeNfc("e\u0301"), "\u00e9");
  EXPECT_EQ(ComposeNfc("a\u0323\u0307b"), "\u1ea1\u0307b");  // marks are put in order first
  EXPECT_EQ(ComposeNfc("a\u0307\u0323b"), "\u1ea1\u0307b");
  EXPECT_EQ(ComposeNfc("\u1112\u1161\u11ab x"), "\ud55c x");  // Hangul
  EXPECT_EQ(ComposeNfc("\u212b"), "\u00c5");                  // singleton
  EXPECT_EQ(ComposeNfc("plain text"), "plain text");
  EXPECT_EQ(ComposeNfc(""), "");
  EXPECT_EQ(ComposeNfc("e\xFF\u0301\xC3"), "e\xFF\u0301\xC3");
}

TEST(NormalizerTest, NfcOfHostileRunsOfMarksIsLinear) {
  std::string text = "a";
  for (int i = 0; i < 200'000; ++i) text += i % 2 == 0 ? "\u0301" : "\u0323";
  const std::clock_t start = std::clock();
  EXPECT_GE(ComposeNfc(text).size(), text.size() / 2);
  EXPECT_LT(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, 5.0);
}

TEST(NormalizerTest, StagesRunInOrderAndAnEmptyTextStaysEmpty) {
  const Normalizer normalizer({{NormalizerStage::Kind::kPrepend, "", "_"},
                               {NormalizerStage::Kind::kReplace, "  ", "="},
                               {NormalizerStage::Kind::kReplace, " ", "_"}});
  EXPECT_EQ(normalizer.Apply("a b   c"), "_a_b=_c");
  EXPECT_EQ(normalizer.Apply(""), "");
}

// Tokens: <unk> 0, <s> 1, bytes 2 to 257, then mark, a, b, mark+a, ab.
Json Sentencepiece(bool byte_fallback) {
  Json vocab{{"<unk>", 0}, {"<s>", 1}};
  for (int byte = 0; byte < 256; ++byte) vocab[fmt::format("<0x{:02X}>", byte)] = 2 + byte;
  for (const std::string token : {kMark, "a", "b", "\u2581a", "ab"}) {
    const size_t id = vocab.size();
    vocab[token] = id;
  }
  const Json to_space{{"type", "Replace"}, {"pattern", {{"String", kMark}}}, {"content", " "}};
  Json decoders{to_space, {{"type", "Fuse"}}};
  if (byte_fallback) decoders.push_back({{"type", "ByteFallback"}});
  return {{"normalizer",
           {{"type", "Sequence"},
            {"normalizers",
             {{{"type", "Prepend"}, {"prepend", kMark}},
              {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kMark}}}}}},
          {"pre_tokenizer", nullptr},
          {"decoder", {{"type", "Sequence"}, {"decoders", decoders}}},
          {"added_tokens",
           {{{"id", 0}, {"content", "<unk>"}, {"special", true}, {"normalized", true}},
            {{"id", 1}, {"content", "<s>"}, {"special", true}, {"normalized", true}}}},
          {"model",
           {{"type", "BPE"},
            {"byte_fallback", byte_fallback},
            {"fuse_unk", true},
            {"unk_token", "<unk>"},
            {"vocab", vocab},
            {"merges", {std::string(kMark) + " a", "a b"}}}}};
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Make(const Json& json) {
  TokenizerFiles files;
  files.tokenizer_json = json.dump();
  return MakeTokenizer(files);
}

TEST(NormalizerTest, CharactersWithoutATokenFallBackToTheirBytes) {
  const auto tokenizer = Make(Sentencepiece(true));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const Tokenizer& t = **tokenizer;
  EXPECT_THAT(t.Encode("ab", SpecialText::kPlain), ElementsAre(261, 260));
  EXPECT_THAT(t.Encode(" b", SpecialText::kPlain), ElementsAre(258, 258, 260));
  EXPECT_THAT(t.Encode("a\u00e9", SpecialText::kPlain), ElementsAre(261, 2 + 0xC3, 2 + 0xA9));
  EXPECT_THAT(t.Encode("a\xFF", SpecialText::kPlain), ElementsAre(261, 2 + 0xFF));
  EXPECT_THAT(t.Encode("", SpecialText::kPlain), ElementsAre());
  EXPECT_EQ(t.TokenBytes(261), " a");
  EXPECT_EQ(t.TokenBytes(2 + 0xC3), "\xC3");
}

// The pattern of a normalised added token has the marker that the normalizer puts before it.
TEST(NormalizerTest, NormalisedAddedTokensAreFoundBehindTheirMarker) {
  const auto tokenizer = Make(Sentencepiece(true));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT((*tokenizer)->Encode("<s>b", SpecialText::kRecognised), ElementsAre(1, 260));
  EXPECT_THAT((*tokenizer)->Encode("a <s>a", SpecialText::kRecognised), ElementsAre(261, 1, 259));
  EXPECT_EQ((*tokenizer)->Encode("a<s>", SpecialText::kRecognised).size(), 4u);  // plain text
}

TEST(NormalizerTest, WithoutFallbackARunOfUnknownCharactersIsOneUnknownToken) {
  const auto tokenizer = Make(Sentencepiece(false));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT((*tokenizer)->Encode("axyzb", SpecialText::kPlain), ElementsAre(261, 0, 260));
}

TEST(NormalizerTest, MetaspacePrependsByItsScheme) {
  Json json = Sentencepiece(true);
  json["normalizer"] = nullptr;
  json["added_tokens"][1]["normalized"] = false;
  const auto ids = [&](const char* scheme, const std::string& text) {
    json["pre_tokenizer"] = {{"type", "Metaspace"},
                             {"replacement", kMark},
                             {"prepend_scheme", scheme},
                             {"split", false}};
    const auto tokenizer = Make(json);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return (*tokenizer)->Encode(text, SpecialText::kRecognised);
  };
  EXPECT_THAT(ids("first", "b<s>b"), ElementsAre(258, 260, 1, 260));
  EXPECT_THAT(ids("always", "b<s>b"), ElementsAre(258, 260, 1, 258, 260));
  EXPECT_THAT(ids("never", "b<s>b"), ElementsAre(260, 1, 260));
  EXPECT_THAT(ids("always", " b"), ElementsAre(258, 260));
}

TEST(NormalizerTest, WhatWeDoNotHaveIsRefusedByName) {
  const auto refusal = [](const Json& json) { return std::string(Make(json).status().message()); };
  Json json = Sentencepiece(true);
  json["model"]["vocab"].erase("<0x00>");
  EXPECT_THAT(refusal(json), HasSubstr("unsupported byte_fallback (1 bytes have no token)"));
  json = Sentencepiece(true);
  json["model"]["byte_fallback"] = false;
  EXPECT_THAT(refusal(json), HasSubstr("unsupported decoder '(no ByteFallback)'"));
  json = Sentencepiece(true);
  json["model"]["unk_token"] = "nowhere";
  EXPECT_THAT(refusal(json), HasSubstr("'nowhere' is not in the vocabulary"));
  json = Sentencepiece(true);
  json["normalizer"]["normalizers"][1]["pattern"] = {{"Regex", "x"}};
  EXPECT_THAT(refusal(json), HasSubstr("unsupported normalizer 'Replace by Regex'"));
  json = Sentencepiece(true);
  json["pre_tokenizer"] = {{"type", "ByteLevel"}};
  EXPECT_THAT(refusal(json), HasSubstr("unsupported pre_tokenizer 'ByteLevel'"));
}

}  // namespace
}  // namespace flashquant
