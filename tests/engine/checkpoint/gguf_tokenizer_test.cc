// The files of a tokenizer made from GGUF metadata.
#include "engine/checkpoint/gguf_tokenizer.h"

#include <filesystem>
#include <fstream>
#include <limits>

#include "engine/checkpoint/gguf_reader.h"
#include "engine/tokenizer/sentencepiece_file.h"
#include "engine/tokenizer/tokenizer_loader.h"
#include "nlohmann/json.hpp"
#include "tests/engine/checkpoint/gguf_builder.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;
using Json = nlohmann::json;

auto IsDataLoss(const std::string& text) {
  return StatusIs(absl::StatusCode::kDataLoss, HasSubstr(text));
}
auto IsUnimplemented(const std::string& text) {
  return StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(text));
}

// Five tokens; what the test changes is given, the rest is good.
struct Metadata {
  std::string model = "gpt2";
  std::string pre = "smollm";
  std::vector<std::string> tokens = {"<|end|>", "a", "b", "ab", "<tool>"};
  std::vector<int32_t> types = {3, 1, 1, 1, 4};
  std::vector<std::string> merges = {"a b"};
  uint32_t bos = 0;
  uint32_t eos = 0;

  GgufBuilder Build() const {
    GgufBuilder gguf;
    gguf.AddString("tokenizer.ggml.model", model)
        .AddString("tokenizer.ggml.pre", pre)
        .AddStrings("tokenizer.ggml.tokens", tokens)
        .AddInts("tokenizer.ggml.token_type", types)
        .AddStrings("tokenizer.ggml.merges", merges)
        .AddInt("tokenizer.ggml.bos_token_id", bos)
        .AddInt("tokenizer.ggml.eos_token_id", eos);
    return gguf;
  }
};

class GgufTokenizerTest : public testing::Test {
 protected:
  absl::StatusOr<GgufTokenizerFiles> Make(const GgufBuilder& builder) {
    const auto gguf = GgufFile::Open(dir_.Write("m.gguf", builder.Build()));
    if (!gguf.ok()) return gguf.status();
    return TokenizerFromGguf(**gguf);
  }
  absl::StatusOr<GgufTokenizerFiles> Make(const Metadata& metadata) {
    return Make(metadata.Build());
  }
  TempDir dir_;
};

TEST_F(GgufTokenizerTest, VocabularyMergesAndAddedTokensAreTaken) {
  const auto files = Make(Metadata());
  FQ_ASSERT_OK(files);
  const Json tokenizer = Json::parse(files->tokenizer_json);
  EXPECT_EQ(tokenizer["model"]["type"], "BPE");
  EXPECT_EQ(tokenizer["model"]["vocab"],
            Json({{"<|end|>", 0}, {"a", 1}, {"b", 2}, {"ab", 3}, {"<tool>", 4}}));
  EXPECT_EQ(tokenizer["model"]["merges"], Json::array({"a b"}));
  ASSERT_EQ(tokenizer["added_tokens"].size(), 2u);
  EXPECT_EQ(tokenizer["added_tokens"][0]["content"], "<|end|>");
  EXPECT_EQ(tokenizer["added_tokens"][0]["special"], true);
  EXPECT_EQ(tokenizer["added_tokens"][1]["id"], 4);
  EXPECT_EQ(tokenizer["added_tokens"][1]["special"], false);
  EXPECT_TRUE(tokenizer["post_processor"].is_null());
  const Json config = Json::parse(files->tokenizer_config_json);
  EXPECT_EQ(config["eos_token"], "<|end|>");
  EXPECT_EQ(config["add_bos_token"], false);
  EXPECT_FALSE(config.contains("chat_template"));
}

// M27: taken along for other tools; the server never renders it.
TEST_F(GgufTokenizerTest, ChatTemplateAndBosAreTaken) {
  const auto files = Make(Metadata()
                              .Build()
                              .AddString("tokenizer.chat_template", "{{ x }}")
                              .AddBool("tokenizer.ggml.add_bos_token", true));
  FQ_ASSERT_OK(files);
  EXPECT_EQ(Json::parse(files->tokenizer_config_json)["chat_template"], "{{ x }}");
  EXPECT_EQ(Json::parse(files->tokenizer_config_json)["add_bos_token"], true);
  const Json processor = Json::parse(files->tokenizer_json)["post_processor"];
  EXPECT_EQ(processor["type"], "TemplateProcessing");
  EXPECT_EQ(processor["single"][0]["SpecialToken"]["id"], "<|end|>");
  EXPECT_EQ(processor["special_tokens"]["<|end|>"]["ids"], Json::array({0}));
}

TEST_F(GgufTokenizerTest, PreTokenizerIsThatOfItsName) {
  const auto pre_tokenizer = [&](const char* name) {
    Metadata metadata;
    metadata.pre = name;
    const auto files = Make(metadata);
    EXPECT_TRUE(files.ok()) << name;
    return Json::parse(files->tokenizer_json);
  };
  EXPECT_EQ(pre_tokenizer("gpt-2")["pre_tokenizer"]["type"], "ByteLevel");
  EXPECT_EQ(pre_tokenizer("gpt-2")["pre_tokenizer"]["use_regex"], true);
  EXPECT_EQ(pre_tokenizer("default")["pre_tokenizer"]["type"], "ByteLevel");
  const Json smollm = pre_tokenizer("smollm")["pre_tokenizer"]["pretokenizers"];
  EXPECT_EQ(smollm[0]["type"], "Digits");
  EXPECT_EQ(smollm[1]["use_regex"], true);
  const Json llama = pre_tokenizer("llama-bpe");
  EXPECT_EQ(llama["pre_tokenizer"]["pretokenizers"][0]["type"], "Split");
  EXPECT_EQ(llama["pre_tokenizer"]["pretokenizers"][1]["use_regex"], false);
  EXPECT_EQ(llama["model"]["ignore_merges"], true);
  EXPECT_EQ(llama["post_processor"]["type"], "TemplateProcessing");
}

// M24
TEST_F(GgufTokenizerTest, UnknownKindsAreRefusedByName) {
  Metadata metadata;
  metadata.pre = "deepseek-v3";
  EXPECT_THAT(Make(metadata), IsUnimplemented("unsupported pre-tokenizer 'deepseek-v3'"));
  metadata = Metadata();
  metadata.model = "bert";
  EXPECT_THAT(Make(metadata), IsUnimplemented("unsupported model 'bert'"));
}

// A GGUF file with the vocabulary of a tokenizer.model.
GgufBuilder WithPieces(const SentencepieceFile& file, const std::vector<float>& scores) {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  for (const SentencepiecePiece& piece : file.pieces) {
    using Kind = SentencepiecePiece::Kind;
    tokens.push_back(piece.content);
    types.push_back(piece.kind == Kind::kNormal        ? 1
                    : piece.kind == Kind::kUnknown     ? 2
                    : piece.kind == Kind::kControl     ? 3
                    : piece.kind == Kind::kUserDefined ? 4
                                                       : 6);
  }
  GgufBuilder gguf;
  gguf.AddString("tokenizer.ggml.model", "llama")
      .AddStrings("tokenizer.ggml.tokens", tokens)
      .AddInts("tokenizer.ggml.token_type", types)
      .AddFloats("tokenizer.ggml.scores", scores)
      .AddInt("tokenizer.ggml.bos_token_id", 1)
      .AddInt("tokenizer.ggml.eos_token_id", 2)
      .AddInt("tokenizer.ggml.unknown_token_id", 0);
  return gguf;
}

std::vector<float> ScoresOf(const SentencepieceFile& file) {
  std::vector<float> scores;
  for (const SentencepiecePiece& piece : file.pieces) scores.push_back(piece.score);
  return scores;
}

absl::StatusOr<SentencepieceFile> ReadModel(const std::string& name) {
  return ParseSentencepieceFile(ReadAll("tests/data/sentencepiece/" + name + ".model"));
}

TEST_F(GgufTokenizerTest, SentencepieceVocabularyGivesTheIdsOfItsOwnFile) {
  const auto original = ReadModel("trimmed");
  FQ_ASSERT_OK(original);
  const auto files = Make(WithPieces(*original, ScoresOf(*original))
                              .AddBool("tokenizer.ggml.remove_extra_whitespaces", true)
                              .AddString("tokenizer.chat_template", "{{ x }}"));
  FQ_ASSERT_OK(files);
  EXPECT_EQ(files->tokenizer_json, "");
  TokenizerFiles texts;
  texts.tokenizer_model = files->tokenizer_model;
  texts.tokenizer_config = files->tokenizer_config_json;
  const auto tokenizer = MakeTokenizer(texts);
  FQ_ASSERT_OK(tokenizer);
  EXPECT_EQ((*tokenizer)->prompt_bos(), 1);
  EXPECT_EQ((*tokenizer)->eos(), 2);
  EXPECT_EQ(Json::parse(files->tokenizer_config_json)["chat_template"], "{{ x }}");
  std::ifstream lines("tests/data/sentencepiece/expected.jsonl");
  int num_texts = 0;
  for (std::string line; std::getline(lines, line);) {
    const Json entry = Json::parse(line);
    if (entry["model"] != "trimmed") continue;
    ++num_texts;
    EXPECT_EQ((*tokenizer)->Encode(entry["text"].get<std::string>(), SpecialText::kPlain),
              entry["ids"].get<std::vector<int32_t>>())
        << entry["text"];
  }
  EXPECT_GT(num_texts, 50);
}

TEST_F(GgufTokenizerTest, SentencepieceOptionsHaveTheDefaultsOfGguf) {
  const auto original = ReadModel("ties");
  FQ_ASSERT_OK(original);
  const auto parsed = [&](const GgufBuilder& gguf) {
    const auto files = Make(gguf);
    EXPECT_THAT(files, IsOk());
    return ParseSentencepieceFile(files.ok() ? files->tokenizer_model : "");
  };
  const auto plain = parsed(WithPieces(*original, ScoresOf(*original)));
  FQ_ASSERT_OK(plain);
  EXPECT_FALSE(plain->byte_fallback);
  EXPECT_TRUE(plain->add_dummy_prefix);
  EXPECT_FALSE(plain->remove_extra_whitespaces);
  const auto without = parsed(
      WithPieces(*original, ScoresOf(*original)).AddBool("tokenizer.ggml.add_space_prefix", false));
  FQ_ASSERT_OK(without);
  EXPECT_FALSE(without->add_dummy_prefix);
}

// Files are padded with unused pieces; no text may become one.
TEST_F(GgufTokenizerTest, UnusedPiecesBecomeControlPieces) {
  const auto files = Make(GgufBuilder()
                              .AddString("tokenizer.ggml.model", "llama")
                              .AddStrings("tokenizer.ggml.tokens", {"<unk>", "a", "[PAD2]"})
                              .AddInts("tokenizer.ggml.token_type", {2, 1, 5})
                              .AddFloats("tokenizer.ggml.scores", {0, -1, 0})
                              .AddBool("tokenizer.ggml.add_bos_token", false));
  FQ_ASSERT_OK(files);
  const auto parsed = ParseSentencepieceFile(files->tokenizer_model);
  FQ_ASSERT_OK(parsed);
  EXPECT_EQ(parsed->pieces[2].kind, SentencepiecePiece::Kind::kControl);
}

TEST_F(GgufTokenizerTest, SentencepieceScoresMustBeThereForEachTokenAndFinite) {
  const auto original = ReadModel("ties");
  FQ_ASSERT_OK(original);
  std::vector<float> scores = ScoresOf(*original);
  scores.back() = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(Make(WithPieces(*original, scores)), IsDataLoss("scores: must be finite numbers"));
  scores.back() = std::numeric_limits<float>::infinity();
  EXPECT_THAT(Make(WithPieces(*original, scores)), IsDataLoss("scores: must be finite numbers"));
  scores.pop_back();
  EXPECT_THAT(Make(WithPieces(*original, scores)), IsDataLoss("must have one value per token"));
  EXPECT_THAT(Make(GgufBuilder()
                       .AddString("tokenizer.ggml.model", "llama")
                       .AddStrings("tokenizer.ggml.tokens", {"<unk>"})
                       .AddInts("tokenizer.ggml.token_type", {2})),
              IsDataLoss("tokenizer.ggml.scores: missing"));
}

TEST_F(GgufTokenizerTest, SentencepieceFilesAreTakenAlongUnderTheirNames) {
  const auto original = ReadModel("ties");
  FQ_ASSERT_OK(original);
  const std::string path = dir_.Write("m.gguf", WithPieces(*original, ScoresOf(*original)).Build());
  auto writer = CheckpointWriter::Create(dir_.File("out"));
  FQ_ASSERT_OK(writer);
  FQ_ASSERT_OK(CopyTokenizerFiles(path, writer->get()));
  const std::string folder = (*writer)->partial_dir();
  FQ_EXPECT_OK(ParseSentencepieceFile(ReadAll(folder + "/tokenizer.model")));
  EXPECT_TRUE(std::filesystem::exists(folder + "/tokenizer_config.json"));
  EXPECT_FALSE(std::filesystem::exists(folder + "/tokenizer.json"));
}

// M23
TEST_F(GgufTokenizerTest, InconsistentVocabularyIsRefused) {
  Metadata metadata;
  metadata.tokens.clear();
  EXPECT_THAT(Make(metadata), IsDataLoss("tokenizer.ggml.tokens: empty"));
  metadata = Metadata();
  metadata.tokens[2] = "a";
  EXPECT_THAT(Make(metadata), IsDataLoss("token 2 occurs twice (a)"));
  metadata = Metadata();
  metadata.tokens[2] = "";
  EXPECT_THAT(Make(metadata), IsDataLoss("token 2 is empty"));
  metadata = Metadata();
  metadata.types.pop_back();
  EXPECT_THAT(Make(metadata), IsDataLoss("one value per token (need 5, got 4)"));
  for (const int32_t type : {0, 7, -1}) {
    metadata = Metadata();
    metadata.types[1] = type;
    EXPECT_THAT(Make(metadata), IsDataLoss("token_type: out of range"));
  }
  for (const char* merge : {"", "ab", " ab", "ab ", "a b c"}) {
    metadata = Metadata();
    metadata.merges = {merge};
    EXPECT_THAT(Make(metadata), IsDataLoss("tokenizer.ggml.merges")) << merge;
  }
}

// M26
TEST_F(GgufTokenizerTest, SpecialIdsMustBeInTheVocabulary) {
  Metadata metadata;
  metadata.eos = 5;
  EXPECT_THAT(Make(metadata), IsDataLoss("eos_token_id: out of range (limit 0..4, got 5)"));
}

TEST_F(GgufTokenizerTest, WrongElementTypesAreRefused) {
  GgufBuilder gguf;
  gguf.AddString("tokenizer.ggml.model", "gpt2")
      .AddString("tokenizer.ggml.pre", "gpt-2")
      .AddInts("tokenizer.ggml.tokens", {1, 2});
  EXPECT_THAT(Make(gguf), IsDataLoss("tokenizer.ggml.tokens: must be an array of strings"));
  EXPECT_THAT(Make(GgufBuilder()), IsDataLoss("tokenizer.ggml.model: missing"));
}

TEST_F(GgufTokenizerTest, FilesOfAFolderAreCopiedAsTheyAre) {
  dir_.Write("in/config.json", "{}");
  dir_.Write("in/tokenizer.json", "{\"a\": 1}");
  dir_.Write("in/merges.txt", "a b\n");
  auto writer = CheckpointWriter::Create(dir_.File("out"));
  FQ_ASSERT_OK(writer);
  FQ_ASSERT_OK(CopyTokenizerFiles(dir_.File("in"), writer->get()));
  EXPECT_EQ(ReadAll((*writer)->partial_dir() + "/tokenizer.json"), "{\"a\": 1}");
  EXPECT_EQ(ReadAll((*writer)->partial_dir() + "/merges.txt"), "a b\n");
  EXPECT_FALSE(std::filesystem::exists((*writer)->partial_dir() + "/vocab.json"));
}

}  // namespace
}  // namespace flashquant
