// tokenizer.model: against what SentencePiece's own library encodes with small models
// (tests/data/sentencepiece), and files that are broken, hostile or of a kind that we do not have.
// Llama-2's real file is in tokenizer_golden_test.cc.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/tokenizer/chat_format.h"
#include "engine/tokenizer/incremental_detokenizer.h"
#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/tokenizer_loader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/tokenizer/sentencepiece_model_file.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kFolder[] = "tests/data/sentencepiece";

std::string ReadText(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeFromModel(std::string model,
                                                         const Json& config = nullptr) {
  TokenizerFiles files;
  files.tokenizer_model = std::move(model);
  if (!config.is_null()) files.tokenizer_config = config.dump();
  return MakeTokenizer(files);
}

std::vector<int32_t> Encode(const std::string& model, std::string_view text,
                            const Json& config = nullptr) {
  const auto tokenizer = MakeFromModel(model, config);
  EXPECT_THAT(tokenizer, IsOk());
  if (!tokenizer.ok()) return {};
  return (*tokenizer)->Encode(text, SpecialText::kPlain);
}

TEST(SentencepieceTest, SmallModelsGiveTheIdsOfTheLibrary) {
  std::map<std::string, std::unique_ptr<Tokenizer>> tokenizers;
  std::ifstream lines(fs::path(kFolder) / "expected.jsonl");
  int num_texts = 0;
  for (std::string line; std::getline(lines, line); ++num_texts) {
    const Json entry = Json::parse(line);
    const auto name = entry["model"].get<std::string>();
    if (tokenizers[name] == nullptr) {
      auto tokenizer = MakeFromModel(ReadText(fs::path(kFolder) / (name + ".model")));
      FQ_ASSERT_OK(tokenizer);
      tokenizers[name] = *std::move(tokenizer);
    }
    EXPECT_THAT(tokenizers[name]->Encode(entry["text"].get<std::string>(), SpecialText::kPlain),
                ElementsAreArray(entry["ids"].get<std::vector<int32_t>>()))
        << name << ": " << entry["text"];
  }
  EXPECT_EQ(tokenizers.size(), 3U);
  EXPECT_GT(num_texts, 200);
}

TEST(SentencepieceTest, FolderWithTheModelFileAloneIsATokenizer) {
  const fs::path dir = fs::path(::testing::TempDir()) / "sentencepiece_folder";
  fs::create_directories(dir);
  std::ofstream(dir / "tokenizer.model", std::ios::binary) << SmallModel();
  std::ofstream(dir / "added_tokens.json") << R"({"<|im_end|>": 7})";
  const auto tokenizer = LoadTokenizer(dir.string());
  fs::remove_all(dir);
  FQ_ASSERT_OK(tokenizer);
  EXPECT_EQ((*tokenizer)->vocab_size(), 8);
  EXPECT_THAT((*tokenizer)->Encode("ab<|im_end|>", SpecialText::kRecognised), ElementsAre(5, 6, 7));
}

// A chat model of the older kind: what it got after training is in the config alone.
TEST(SentencepieceTest, ChatFormatComesFromTheConfigBesideTheModelFile) {
  const fs::path dir = fs::path(::testing::TempDir()) / "sentencepiece_chat";
  fs::create_directories(dir);
  std::ofstream(dir / "tokenizer.model", std::ios::binary)
      << ReadText(fs::path(kFolder) / "trimmed.model");
  const Json config = {
      {"added_tokens_decoder",
       {{"700", {{"content", "<|im_start|>"}, {"special", true}}},
        {"701", {{"content", "<|im_end|>"}, {"special", true}}}}},
      {"eos_token", "<|im_end|>"},
      {"chat_template",
       "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
       "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}"
       "{{ '<|im_start|>assistant\\n' }}{% endif %}"}};
  std::ofstream(dir / "tokenizer_config.json") << config.dump();
  const auto tokenizer = LoadTokenizer(dir.string());
  FQ_ASSERT_OK(tokenizer);
  const auto format = ChatFormat::Load(dir.string(), tokenizer->get());
  fs::remove_all(dir);
  FQ_ASSERT_OK(format);
  EXPECT_EQ(format->name(), "chatml");
  EXPECT_THAT(format->end_of_turn_ids(), ElementsAre(701));
  const std::vector<ChatMessage> messages{{"user", "<|im_end|>"}};
  const auto prompt = format->BuildPrompt(messages);
  FQ_ASSERT_OK(prompt);
  EXPECT_EQ(prompt->front(), 700);
  // One end of a turn: the user's text does not make a second one.
  EXPECT_EQ(std::count(prompt->begin(), prompt->end(), 701), 1);
}

TEST(SentencepieceTest, BosIsTheFilesControlPieceUnlessTheConfigSaysOtherwise) {
  const auto alone = MakeFromModel(SmallModel());
  FQ_ASSERT_OK(alone);
  EXPECT_EQ((*alone)->prompt_bos(), 1);
  EXPECT_EQ((*alone)->bos(), 1);
  EXPECT_EQ((*alone)->eos(), 2);
  const auto without = MakeFromModel(SmallModel(), {{"add_bos_token", false}});
  FQ_ASSERT_OK(without);
  EXPECT_EQ((*without)->prompt_bos(), std::nullopt);
  EXPECT_EQ((*without)->bos(), 1);
  const auto other = MakeFromModel(SmallModel(), {{"bos_token", "</s>"}});
  FQ_ASSERT_OK(other);
  EXPECT_EQ((*other)->prompt_bos(), 2);
  const auto renamed =
      MakeFromModel(SmallPieces() + WireBytes(2, WireNumber(3, 2) + WireBytes(46, "<begin>")));
  FQ_ASSERT_OK(renamed);
  EXPECT_EQ((*renamed)->prompt_bos(), std::nullopt);
}

TEST(SentencepieceTest, ControlPiecesAreNotMadeFromText) {
  const auto tokenizer = MakeFromModel(SmallModel());
  FQ_ASSERT_OK(tokenizer);
  EXPECT_THAT((*tokenizer)->Encode("<s>", SpecialText::kPlain), ElementsAre(5, 0));
  EXPECT_THAT((*tokenizer)->Encode("<s>", SpecialText::kRecognised), ElementsAre(1));
  EXPECT_TRUE((*tokenizer)->IsSpecial(0));
  EXPECT_TRUE((*tokenizer)->IsSpecial(1));
  EXPECT_FALSE((*tokenizer)->IsSpecial(3));
}

TEST(SentencepieceTest, UserDefinedPiecesAreFoundInTextUnlessTheConfigCallsThemSpecial) {
  const std::string model =
      SmallPieces() + WirePiece("<sep>", 0, kUserPiece) + BpeSpec() + KeepingSpec();
  EXPECT_THAT(Encode(model, "a<sep>"), ElementsAre(5, 3, 7));
  EXPECT_THAT(Encode(model, "a<sep>", {{"additional_special_tokens", {"<sep>"}}}),
              ElementsAre(5, 3, 0));
}

TEST(SentencepieceTest, TokensOfTheConfigGetTheirIdsAfterThePieces) {
  const Json config = {{"added_tokens_decoder",
                        {{"7", {{"content", "<|im_start|>"}, {"special", true}}},
                         {"8", {{"content", "<tool>"}, {"special", false}}}}}};
  const auto tokenizer = MakeFromModel(SmallModel(), config);
  FQ_ASSERT_OK(tokenizer);
  EXPECT_EQ((*tokenizer)->vocab_size(), 9);
  EXPECT_EQ((*tokenizer)->TokenId("<|im_start|>"), 7);
  EXPECT_TRUE((*tokenizer)->IsSpecial(7));
  EXPECT_FALSE((*tokenizer)->IsSpecial(8));
  Json hole = config;
  hole["added_tokens_decoder"].erase("7");
  EXPECT_THAT(MakeFromModel(SmallModel(), hole),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("no token 7, greatest id 8")));
  for (const char* key : {"x", "-1", "7x", "", "99999999999999999999", "1048576"}) {
    const Json bad = {{"added_tokens_decoder", {{key, {{"content", "<|im_start|>"}}}}}};
    EXPECT_THAT(MakeFromModel(SmallModel(), bad),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("key must be a token id")))
        << key;
  }
}

TEST(SentencepieceTest, ConfigMayForbidTheSpaceInFront) {
  EXPECT_THAT(Encode(SmallModel(), "ab"), ElementsAre(5, 6));
  EXPECT_THAT(Encode(SmallModel(), "ab", {{"add_prefix_space", true}}), ElementsAre(5, 6));
  EXPECT_THAT(Encode(SmallModel(), "ab", {{"add_prefix_space", false}}), ElementsAre(6));
}

TEST(SentencepieceTest, TextComesBackWithTheSpaceInFrontAsFromTokenizerJson) {
  const auto tokenizer = MakeFromModel(ReadText(fs::path(kFolder) / "trimmed.model"));
  FQ_ASSERT_OK(tokenizer);
  const std::string text = "caf\xC3\xA9 \xF0\x9F\x98\x80 <sep> don't";
  IncrementalDetokenizer detokenizer(tokenizer->get());
  std::string decoded;
  for (const int32_t id : (*tokenizer)->Encode(text, SpecialText::kPlain)) {
    decoded += detokenizer.Append(id);
  }
  EXPECT_EQ(decoded + detokenizer.Flush(), " " + text);
}

TEST(SentencepieceTest, BytesThatAreNotUtf8FallBackToTheirPieces) {
  const auto tokenizer = MakeFromModel(ReadText(fs::path(kFolder) / "trimmed.model"));
  FQ_ASSERT_OK(tokenizer);
  std::string decoded;
  for (const int32_t id : (*tokenizer)->Encode("a\xFF\xC3z\xE2\x96", SpecialText::kPlain)) {
    decoded += (*tokenizer)->TokenBytes(id);
  }
  EXPECT_EQ(decoded, " a\xFF\xC3z\xE2\x96");
}

void ExpectRefused(const std::string& model, absl::StatusCode code, const std::string& text) {
  EXPECT_THAT(MakeFromModel(model), StatusIs(code, HasSubstr("tokenizer.model: " + text)));
}

void ExpectBroken(const std::string& model, const std::string& text) {
  ExpectRefused(model, absl::StatusCode::kDataLoss, text);
}

void ExpectUnsupported(const std::string& model, const std::string& text) {
  ExpectRefused(model, absl::StatusCode::kUnimplemented, "tokenizer: unsupported " + text);
}

TEST(SentencepieceTest, OtherModelsThanBpeAreRefusedByName) {
  ExpectUnsupported(SmallPieces(), "model 'unigram'");  // what the file's silence means
  ExpectUnsupported(SmallPieces() + WireBytes(2, WireNumber(3, 1)), "model 'unigram'");
  ExpectUnsupported(SmallPieces() + WireBytes(2, WireNumber(3, 3)), "model 'word'");
  ExpectUnsupported(SmallPieces() + WireBytes(2, WireNumber(3, 4)), "model 'char'");
  ExpectUnsupported(SmallPieces() + WireBytes(2, WireNumber(3, 9)), "model 'type 9'");
}

TEST(SentencepieceTest, OptionsThatChangeTheIdsAreRefusedByName) {
  ExpectUnsupported(SmallPieces() + WireBytes(2, WireNumber(3, 2) + WireNumber(24, 1)),
                    "model option 'treat_whitespace_as_suffix'");
  const std::string charsmap = WireBytes(1, "nmt_nfkc") + WireBytes(2, "xyz");
  ExpectUnsupported(SmallPieces() + BpeSpec() + WireBytes(3, charsmap), "normalizer 'nmt_nfkc'");
  ExpectUnsupported(SmallPieces() + BpeSpec() + WireBytes(5, charsmap), "denormalizer 'nmt_nfkc'");
  ExpectUnsupported(SmallPieces() + BpeSpec() + WireBytes(3, WireNumber(5, 0)),
                    "normalizer option 'escape_whitespaces off'");
  ExpectUnsupported(SmallPieces() + WirePiece("x", 0, kUnusedPiece) + BpeSpec(),
                    "kind of piece 'unused'");
}

TEST(SentencepieceTest, FilesOfAnotherKindUnderTheNameAreCalledSo) {
  for (const std::string& bytes : std::vector<std::string>{
           "", "IQ== 0\nIg== 1\n", "{\"model\": {}}", std::string(100, '\0'),
           std::string(100, '\xFF'), "version https://git-lfs.github.com/spec/v1\n"}) {
    EXPECT_THAT(MakeFromModel(bytes),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("not a SentencePiece model")))
        << bytes;
  }
}

TEST(SentencepieceTest, EveryCutOfAFileIsRefusedOrStillUsable) {
  const std::string model = ReadText(fs::path(kFolder) / "ties.model");
  ASSERT_GT(model.size(), 100U);
  for (size_t num_bytes = 0; num_bytes < model.size(); ++num_bytes) {
    const auto tokenizer = MakeFromModel(model.substr(0, num_bytes));
    if (tokenizer.ok()) (void)(*tokenizer)->Encode("aab zz", SpecialText::kPlain);
  }
  // Cut inside a message.
  ExpectBroken(SmallModel().substr(0, 20), "ends early, after 1 pieces");
}

TEST(SentencepieceTest, BrokenPiecesAreRefused) {
  const std::string rest = BpeSpec();
  ExpectBroken(SmallPieces() + WirePiece("ab", 0) + rest, "piece 7 'ab' appears twice");
  ExpectBroken(SmallPieces() + WirePiece("", 0) + rest, "piece 7 has no text");
  ExpectBroken(SmallPieces() + WirePiece("\xC3", 0) + rest, "piece 7 is not UTF-8");
  ExpectBroken(SmallPieces() + WirePiece(std::string(5000, 'x'), 0) + rest,
               "piece 7 too long (limit 4096 bytes, got 5000)");
  ExpectBroken(SmallPieces() + WirePiece("x", std::nanf("")) + rest, "piece 7: score must be");
  ExpectBroken(SmallPieces() + WirePiece("x", std::numeric_limits<float>::infinity()) + rest,
               "piece 7: score must be");
  ExpectBroken(SmallPieces() + WirePiece("x", 0, 7) + rest, "piece 7: type out of range");
  ExpectBroken(SmallPieces() + WirePiece("<unk2>", 0, kUnknownPiece) + rest,
               "must have one unknown piece (got 2)");
  ExpectBroken(WirePiece("a", 0) + rest, "must have one unknown piece (got 0)");
  ExpectBroken(rest, "no pieces");
}

TEST(SentencepieceTest, BytePiecesMustMatchTheFallback) {
  ExpectBroken(SmallPieces() + WirePiece("x", 0, kBytePiece) + BpeSpec(), "piece 7 'x': byte");
  ExpectBroken(SmallPieces() + WirePiece("<0x41>", 0) + BpeSpec(), "piece 7 '<0x41>': byte");
  ExpectBroken(SmallPieces() + WirePiece("<0x41>", 0, kBytePiece) + BpeSpec(),
               "byte_fallback is false, but 1 of 256");
  ExpectBroken(SmallPieces() + WirePiece("<0x41>", 0, kBytePiece) +
                   WireBytes(2, WireNumber(3, 2) + WireNumber(35, 1)),
               "byte_fallback is true, but 1 of 256");
}

// A file of 8 MiB that would be 2 million pieces is refused at the first piece above the limit.
TEST(SentencepieceTest, TooManyPiecesAreRefusedBeforeTheyTakeMemory) {
  std::string model;
  for (int i = 0; i <= 1 << 20; ++i) {
    model += WireBytes(1, WireBytes(1, "p" + std::to_string(i)));
  }
  ExpectBroken(model + BpeSpec(), "too many pieces (limit 1048576, got more)");
}

TEST(SentencepieceTest, UnknownFieldsAreSkippedAndRepeatedMessagesMerge) {
  const std::string spec = WireBytes(2, WireNumber(3, 2)) + WireBytes(2, WireNumber(99, 5));
  EXPECT_THAT(Encode(SmallPieces() + spec + KeepingSpec() + WireBytes(4, "self test") +
                         WireBytes(200, "extension"),
                     "ab"),
              ElementsAre(5, 6));
}

TEST(SentencepieceTest, TextOfSpacesAloneHasNoTokensWhereSpacesAreTrimmed) {
  const std::string model = SmallPieces() + BpeSpec();
  EXPECT_THAT(Encode(model, "   "), IsEmpty());
  EXPECT_THAT(Encode(model, ""), IsEmpty());
  EXPECT_THAT(Encode(model, "  a   b "), ElementsAre(5, 3, 5, 4));
}

}  // namespace
}  // namespace flashquant
