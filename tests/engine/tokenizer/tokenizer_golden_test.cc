// The ids of real tokenizers against golden ids made with other programs: Hugging Face tokenizers
// (tokenizer_golden.jsonl), llama.cpp (vectors) and transformers (reference.json of the story
// model). Needs the data folder; hand-made cases are in bpe_tokenizer_test.cc.
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/tokenizer_loader.h"
#include "engine/tokenizer/unicode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace flashquant {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using ::testing::ElementsAreArray;

fs::path DataRoot() {
  const char* root = std::getenv("FQ_TEST_DATA");
  return root != nullptr ? root : "../shared";
}

std::string ReadText(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A tokenizer of the data folder; gpt2 lies in two places there.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadNamed(const std::string& name) {
  const fs::path tokenizers = DataRoot() / "data" / "tokenizers";
  if (name == "story-22m") return LoadTokenizer((DataRoot() / "models" / name).string());
  if (name != "gpt2" && name != "opt") return LoadTokenizer((tokenizers / name).string());
  TokenizerFiles files;
  files.vocab_json = ReadText(tokenizers / name / "vocab.json");
  files.merges_txt = ReadText(tokenizers / "opt" / "merges.txt");
  return MakeTokenizer(files);
}

#define NEED_DATA(path)                               \
  if (!fs::exists(DataRoot() / (path))) {             \
    GTEST_SKIP() << "needs FQ_TEST_DATA: " << (path); \
  }                                                   \
  static_assert(true)

void ExpectGoldenIds(const std::string& name) {
  const auto tokenizer = LoadNamed(name);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  std::ifstream lines(DataRoot() / "data/prompts/tokenizer_golden.jsonl");
  int num_strings = 0;
  for (std::string line; std::getline(lines, line); ++num_strings) {
    const Json entry = Json::parse(line);
    const auto text = entry["text"].get<std::string>();
    EXPECT_THAT((*tokenizer)->Encode(text, SpecialText::kRecognised),
                ElementsAreArray(entry["ids"][name].get<std::vector<int32_t>>()))
        << "string " << entry["id"] << " of " << name;
  }
  EXPECT_GE(num_strings, 50);
}

TEST(TokenizerGoldenTest, SmolLm2GivesTheIdsOfHuggingFace) {
  NEED_DATA("data/tokenizers/smollm2/tokenizer.json");
  ExpectGoldenIds("smollm2");
}

TEST(TokenizerGoldenTest, Gpt2VocabAndMergesGiveTheIdsOfHuggingFace) {
  NEED_DATA("data/tokenizers/gpt2/vocab.json");
  ExpectGoldenIds("gpt2");
}

TEST(TokenizerGoldenTest, OptVocabAndMergesGiveTheIdsOfHuggingFace) {
  NEED_DATA("data/tokenizers/opt/vocab.json");
  ExpectGoldenIds("opt");
}

TEST(TokenizerGoldenTest, Gpt2GivesTheIdsOfLlamaCpp) {
  NEED_DATA("data/tokenizers/vectors/inputs.inp");
  const auto tokenizer = LoadNamed("gpt2");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string inputs = ReadText(DataRoot() / "data/tokenizers/vectors/inputs.inp");
  std::ifstream expected(DataRoot() / "data/tokenizers/vectors/gpt-2.out");
  const std::string separator = "\n__ggml_vocab_test__\n";
  int num_strings = 0;
  size_t pos = 0;
  for (std::string line; std::getline(expected, line); ++num_strings) {
    const size_t end = inputs.find(separator, pos);
    const std::string text = inputs.substr(pos, end == std::string::npos ? end : end - pos);
    pos = end == std::string::npos ? inputs.size() : end + separator.size();
    std::istringstream numbers(line);
    const std::vector<int32_t> ids{std::istream_iterator<int32_t>(numbers), {}};
    EXPECT_THAT((*tokenizer)->Encode(text, SpecialText::kPlain), ElementsAreArray(ids))
        << "string " << num_strings;
  }
  EXPECT_EQ(num_strings, 46);  // the empty string after the last separator has no line
}

TEST(TokenizerGoldenTest, StoryModelPromptsAreThoseOfItsReference) {
  NEED_DATA("models/story-22m/reference.json");
  const auto tokenizer = LoadNamed("story-22m");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->prompt_bos(), 0);
  EXPECT_EQ((*tokenizer)->eos(), 0);
  EXPECT_EQ((*tokenizer)->vocab_size(), 8192);
}

}  // namespace
}  // namespace flashquant
