// tokenizer.json and tokenizer_config.json made from GGUF metadata.
#include "engine/checkpoint/gguf_tokenizer.h"

#include <filesystem>

#include "engine/checkpoint/gguf_reader.h"
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
  metadata.model = "llama";
  EXPECT_THAT(Make(metadata), IsUnimplemented("unsupported model 'llama'"));
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
