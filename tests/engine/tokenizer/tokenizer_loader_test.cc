// Rows M23, M24 and M26: tokenizer files that are broken, hostile or of a kind that we do not have;
// and where BOS comes from.
#include "engine/tokenizer/tokenizer_loader.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/tokenizer/tiny_tokenizer.h"

namespace flashquant {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Json Tiny() { return TinyTokenizerJson({{"t", "h"}}, {"<s>"}); }  // "th" 256, "<s>" 257

void ExpectRefused(const Json& json, absl::StatusCode code, const std::string& text) {
  const auto tokenizer = MakeFromJson(json);
  ASSERT_FALSE(tokenizer.ok()) << text;
  EXPECT_EQ(tokenizer.status().code(), code) << tokenizer.status();
  EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr(text));
}

void ExpectBroken(const Json& json, const std::string& text) {
  ExpectRefused(json, absl::StatusCode::kDataLoss, text);
}

void ExpectUnsupported(const Json& json, const std::string& text) {
  ExpectRefused(json, absl::StatusCode::kUnimplemented, text);
}

TEST(TokenizerLoaderTest, MissingSectionsAreBroken) {
  Json json = Tiny();
  json.erase("model");
  ExpectBroken(json, "model");
  json = Tiny();
  json["model"].erase("vocab");
  ExpectBroken(json, "vocab");
  json = Tiny();
  json["model"].erase("merges");
  ExpectBroken(json, "merges");
  json = Tiny();
  json["model"]["vocab"] = Json::object();
  ExpectBroken(json, "model.vocab: empty");
}

TEST(TokenizerLoaderTest, IdsWithHolesDuplicatesOrOutOfRangeAreBroken) {
  Json json = Tiny();
  json["added_tokens"][0]["id"] = 258;
  ExpectBroken(json, "ids have holes (no token 257, greatest id 258)");
  json = Tiny();
  json["model"]["vocab"]["x1"] = 5;
  ExpectBroken(json, "model.vocab: id 5 appears twice");
  json = Tiny();
  json["model"]["vocab"]["x1"] = 1 << 20;
  ExpectBroken(json, "id out of range (limit 1048576, got 1048576)");
  json["model"]["vocab"]["x1"] = -1;
  ExpectBroken(json, "id out of range");
  json["model"]["vocab"]["x1"] = 257.5;
  ExpectBroken(json, "id must be an integer");
  json["model"]["vocab"]["x1"] = 18446744073709551615u;
  ExpectBroken(json, "id out of range");
}

TEST(TokenizerLoaderTest, RepeatedKeyInTheVocabularyIsBroken) {
  std::string text = Tiny().dump();
  const std::string first = R"("vocab":{)";
  text.insert(text.find(first) + first.size(), R"("a":97,)");
  TokenizerFiles files;
  files.tokenizer_json = text;
  const auto tokenizer = MakeTokenizer(files);
  ASSERT_FALSE(tokenizer.ok());
  EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kDataLoss);
}

TEST(TokenizerLoaderTest, MergesOfUnknownTokensOrNotPairsAreBroken) {
  Json json = Tiny();
  json["model"]["merges"].push_back(Json::array({"x", "yy"}));
  ExpectBroken(json, "merge 1 names a token that is not in the vocabulary");
  json = Tiny();
  json["model"]["merges"].push_back(Json::array({"x", "y"}));
  ExpectBroken(json, "merge 1 makes a token that is not in the vocabulary");
  json["model"]["merges"][1] = "t h";
  ExpectBroken(json, "merge 1 appears twice");
  for (const Json& bad : {Json("th"), Json("t h e"), Json(7), Json::array({"t"}),
                          Json::array({"t", "h", "e"}), Json::array({"t", 1})}) {
    json["model"]["merges"][1] = bad;
    ExpectBroken(json, "merge 1 is not a pair");
  }
  json["model"]["merges"][1] = Json::array({"", "th"});
  ExpectBroken(json, "merge 1 names");
}

TEST(TokenizerLoaderTest, TooManyMergesAreBroken) {
  std::string text = Tiny().dump();
  const std::string list = R"("merges":[)";
  std::string many;
  for (int i = 0; i < (1 << 21); ++i) many += "0,";
  text.insert(text.find(list) + list.size(), many);
  TokenizerFiles files;
  files.tokenizer_json = text;
  const auto tokenizer = MakeTokenizer(files);
  ASSERT_FALSE(tokenizer.ok());
  EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr("2097152"));
}

TEST(TokenizerLoaderTest, MergeThatMakesAControlTokenIsBroken) {
  Json json = TinyTokenizerJson({{"t", "h"}}, {});
  json["added_tokens"].push_back({{"id", 256}, {"content", "th"}, {"special", true}});
  ExpectBroken(json, "merge 0 makes the special token 256");
}

TEST(TokenizerLoaderTest, AddedTokensMustBeTextOfTheirOwnId) {
  Json json = Tiny();
  json["added_tokens"][0]["content"] = "";
  ExpectBroken(json, "id 257 has no text");
  json["added_tokens"][0]["content"] = std::string(513, 'x');
  ExpectBroken(json, "content");
  json["added_tokens"][0]["content"] = "th";
  ExpectBroken(json, "id 257 is another token in model.vocab");
  json["added_tokens"][0] = {{"id", 5}, {"content", "<s>"}};
  ExpectBroken(json, "id 5 is another token in model.vocab");
  json = Tiny();
  json["added_tokens"].push_back(json["added_tokens"][0]);
  ExpectBroken(json, "id 257 appears twice");
  json["added_tokens"][1]["id"] = 258;
  ExpectBroken(json, "the token of id 258 appears twice");
  json["added_tokens"][1]["id"] = 4294967296;
  ExpectBroken(json, "added_tokens[1]");
}

TEST(TokenizerLoaderTest, ByteTokensAreOrdinaryTextInAByteLevelVocabulary) {
  Json json = Tiny();
  json["model"]["vocab"]["<0x-1>"] = 258;
  json["model"]["vocab"]["<0xZZ>"] = 259;
  const auto tokenizer = MakeFromJson(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->TokenBytes(258), "<0x-1>");
  json["model"]["byte_fallback"] = true;
  ExpectUnsupported(json, "unsupported model option 'byte_fallback'");
}

TEST(TokenizerLoaderTest, UnknownKindsAreNamed) {
  const auto with = [](const char* section, const Json& value) {
    Json json = Tiny();
    json[section] = value;
    return json;
  };
  const auto kind = [](const char* type) { return Json{{"type", type}}; };
  ExpectUnsupported(with("normalizer", kind("NFKC")), "tokenizer: unsupported normalizer 'NFKC'");
  ExpectUnsupported(with("pre_tokenizer", kind("Metaspace")),
                    "tokenizer: unsupported pre_tokenizer 'Metaspace'");
  ExpectUnsupported(with("pre_tokenizer", nullptr), "unsupported pre_tokenizer '(no ByteLevel)'");
  ExpectUnsupported(with("decoder", kind("WordPiece")), "unsupported decoder 'WordPiece'");
  ExpectUnsupported(with("decoder", nullptr), "unsupported decoder '(none)'");
  ExpectUnsupported(with("post_processor", kind("BertProcessing")),
                    "unsupported post_processor 'BertProcessing'");
  Json json = Tiny();
  json["model"]["type"] = "Unigram";
  ExpectUnsupported(json, "unsupported model 'Unigram'");
  json["model"]["type"] = "BPE";
  json["model"]["dropout"] = 0.1;
  ExpectUnsupported(json, "unsupported model option 'dropout'");
  json["model"]["dropout"] = nullptr;
  json["model"]["end_of_word_suffix"] = "</w>";
  ExpectUnsupported(json, "unsupported model option 'end_of_word_suffix'");
}

TEST(TokenizerLoaderTest, UnknownSplitsAreNamed) {
  Json split{{"type", "Split"}, {"pattern", {{"Regex", "\\d+"}}}, {"behavior", "Isolated"}};
  const Json byte_level{{"type", "ByteLevel"}, {"use_regex", false}, {"add_prefix_space", false}};
  const auto load = [&](Json list) {
    Json json = Tiny();
    json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", std::move(list)}};
    return json;
  };
  ExpectUnsupported(load({split, byte_level}), "unsupported pre_tokenizer 'Split by");
  split["pattern"] = {{"String", " "}};
  ExpectUnsupported(load({split, byte_level}), "'Split by String'");
  ExpectUnsupported(load({byte_level, byte_level}), "'ByteLevel after ByteLevel'");
  ExpectUnsupported(load({split}), "unsupported pre_tokenizer");
}

TEST(TokenizerLoaderTest, UnknownTokenIsUnsupportedOnlyWhereItCouldOccur) {
  Json json = Tiny();
  json["model"]["unk_token"] = "<s>";
  EXPECT_TRUE(MakeFromJson(json).ok());
  json = TinyTokenizerJson({}, {});
  json["model"]["vocab"].erase(SpelledByte(255));
  json["model"]["unk_token"] = "a";
  ExpectUnsupported(json, "unsupported unk_token");
}

TEST(TokenizerLoaderTest, AnythingButJsonIsBroken) {
  for (const char* text : {"", "[]", "null", "{", "\xFF", "{}"}) {
    TokenizerFiles files;
    files.tokenizer_json = text;
    const auto tokenizer = MakeTokenizer(files);
    ASSERT_FALSE(tokenizer.ok()) << text;
    EXPECT_NE(tokenizer.status().code(), absl::StatusCode::kNotFound) << text;
  }
}

TEST(TokenizerLoaderTest, BosComesFromTheTemplateElseFromAddBosToken) {
  const Json config{{"bos_token", {{"content", "<s>"}}}, {"add_bos_token", true}};
  auto tokenizer = MakeFromJson(Tiny(), config);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->prompt_bos(), 257);
  EXPECT_EQ((*tokenizer)->eos(), std::nullopt);

  Json json = Tiny();
  const Json text{{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const Json token{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}};
  json["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single", Json::array({token, text})},
      {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {257}}, {"tokens", {"<s>"}}}}}}};
  tokenizer = MakeFromJson(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->prompt_bos(), 257);
  EXPECT_EQ((*tokenizer)->bos(), 257);

  json["post_processor"]["single"] = Json::array({text});
  tokenizer = MakeFromJson(json, config);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->prompt_bos(), std::nullopt);

  json["post_processor"]["single"] = Json::array({token, token, text});
  ExpectUnsupported(json, "template with two tokens");
  json["post_processor"]["single"] = Json::array({text, token});
  ExpectUnsupported(json, "template with a token after the text");
  json["post_processor"]["single"] = Json::array({token, text});
  json["post_processor"]["special_tokens"]["<s>"]["ids"] = {9999};
  ExpectBroken(json, "9999 is not in the vocabulary");
}

TEST(TokenizerLoaderTest, BosAndEosMustBeInTheVocabulary) {
  for (const char* key : {"bos_token", "eos_token"}) {
    const auto tokenizer = MakeFromJson(Tiny(), {{key, "<none>"}});
    ASSERT_FALSE(tokenizer.ok());
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr(key));
  }
  EXPECT_EQ(MakeFromJson(Tiny(), {{"add_bos_token", true}}).status().code(),
            absl::StatusCode::kDataLoss);
}

TEST(TokenizerLoaderTest, OlderPairOfFilesIsReadWithItsControlTokens) {
  TokenizerFiles files;
  Json vocab = Tiny()["model"]["vocab"];
  vocab["</s>"] = 257;
  files.vocab_json = vocab.dump();
  files.merges_txt = "#version: 0.2\nt h\r\n\n";
  auto tokenizer = MakeTokenizer(files);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT((*tokenizer)->Encode("th", SpecialText::kPlain), ElementsAre(256));
  EXPECT_FALSE((*tokenizer)->IsSpecial(257));

  files.tokenizer_config = R"({"eos_token": "</s>", "bos_token": {"content": "</s>"},
                               "add_bos_token": true, "pad_token": "<pad>"})";
  tokenizer = MakeTokenizer(files);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_TRUE((*tokenizer)->IsSpecial(257));
  EXPECT_EQ((*tokenizer)->prompt_bos(), 257);
  EXPECT_THAT((*tokenizer)->Encode("</s>th", SpecialText::kRecognised), ElementsAre(257, 256));

  files.merges_txt = "t h e\n";
  EXPECT_THAT(std::string(MakeTokenizer(files).status().message()),
              HasSubstr("merges.txt: line 1 is not a pair"));
}

TEST(TokenizerLoaderTest, FolderWithoutTokenizerIsNotFound) {
  const std::filesystem::path dir =
      std::filesystem::path(::testing::TempDir()) / "tokenizer_loader_test";
  std::filesystem::create_directories(dir);
  EXPECT_EQ(LoadTokenizer(dir.string()).status().code(), absl::StatusCode::kNotFound);
  std::ofstream(dir / "tokenizer.json") << Tiny().dump();
  EXPECT_TRUE(LoadTokenizer(dir.string()).ok());
  std::filesystem::remove_all(dir);
  EXPECT_EQ(LoadTokenizer(dir.string()).status().code(), absl::StatusCode::kNotFound);
}

// A smaller sample than the fuzz target takes: every prefix and every changed byte of a small file
// gives a tokenizer or an error.
TEST(TokenizerLoaderTest, CutOrChangedFilesNeverCrash) {
  Json json = Tiny();
  json["model"]["vocab"] = {{"a", 0}, {"b", 1}, {"ab", 2}};
  json["model"]["merges"] = {"a b"};
  json["added_tokens"][0]["id"] = 3;
  const std::string text = json.dump();
  TokenizerFiles files;
  files.tokenizer_json = text;
  ASSERT_TRUE(MakeTokenizer(files).ok()) << MakeTokenizer(files).status();
  int num_accepted = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    files.tokenizer_json = text.substr(0, i);
    EXPECT_FALSE(MakeTokenizer(files).ok()) << "cut to " << i;
    for (const char c : {'0', '"', '}', '\x80', 'z'}) {
      std::string changed = text;
      changed[i] = c;
      files.tokenizer_json = changed;
      const auto tokenizer = MakeTokenizer(files);
      if (!tokenizer.ok()) continue;
      ++num_accepted;
      for (const int32_t id : (*tokenizer)->Encode("ab <s>", SpecialText::kRecognised)) {
        EXPECT_LT(id, (*tokenizer)->vocab_size());
      }
    }
  }
  EXPECT_GT(num_accepted, 0);
}

}  // namespace
}  // namespace flashquant
