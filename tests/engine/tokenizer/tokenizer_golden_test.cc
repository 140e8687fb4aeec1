// The ids of real tokenizers against golden ids made with other programs: Hugging Face tokenizers
// (tokenizer_golden.jsonl), llama.cpp (vectors) and transformers (reference.json of the story
// model). Needs the data folder; hand-made cases are in bpe_tokenizer_test.cc.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/tokenizer/incremental_detokenizer.h"
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

void ExpectGoldenIds(const Tokenizer& tokenizer, const std::string& name) {
  std::ifstream lines(DataRoot() / "data/prompts/tokenizer_golden.jsonl");
  int num_strings = 0;
  for (std::string line; std::getline(lines, line); ++num_strings) {
    const Json entry = Json::parse(line);
    const auto text = entry["text"].get<std::string>();
    EXPECT_THAT(tokenizer.Encode(text, SpecialText::kRecognised),
                ElementsAreArray(entry["ids"][name].get<std::vector<int32_t>>()))
        << "string " << entry["id"] << " of " << name;
  }
  EXPECT_GE(num_strings, 50);
}

void ExpectGoldenIds(const std::string& name) {
  const auto tokenizer = LoadNamed(name);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  ExpectGoldenIds(**tokenizer, name);
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

// The strings of the vectors folder against the ids of llama.cpp, one line for each string.
void ExpectVectors(const Tokenizer& tokenizer, const std::string& name) {
  const fs::path folder = DataRoot() / "data/tokenizers/vectors";
  const std::string inputs = ReadText(folder / "inputs.inp");
  std::ifstream expected(folder / (name + ".out"));
  const std::string separator = "\n__ggml_vocab_test__\n";
  int num_strings = 0;
  size_t pos = 0;
  for (std::string line; std::getline(expected, line); ++num_strings) {
    const size_t end = inputs.find(separator, pos);
    const std::string text = inputs.substr(pos, end == std::string::npos ? end : end - pos);
    pos = end == std::string::npos ? inputs.size() : end + separator.size();
    std::istringstream numbers(line);
    const std::vector<int32_t> ids{std::istream_iterator<int32_t>(numbers), {}};
    EXPECT_THAT(tokenizer.Encode(text, SpecialText::kPlain), ElementsAreArray(ids))
        << name << ", string " << num_strings;
  }
  EXPECT_EQ(num_strings, 46);  // the empty string after the last separator has no line
}

TEST(TokenizerGoldenTest, Gpt2GivesTheIdsOfLlamaCpp) {
  NEED_DATA("data/tokenizers/vectors/inputs.inp");
  const auto tokenizer = LoadNamed("gpt2");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  ExpectVectors(**tokenizer, "gpt-2");
}

// Its file is compressed in the data folder.
std::string Uncompressed(const fs::path& path) {
  std::string text;
  FILE* pipe = popen(("xz -dc '" + path.string() + "'").c_str(), "r");
  if (pipe == nullptr) return text;
  std::vector<char> buffer(size_t{1} << 16);
  while (const size_t num_read = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    text.append(buffer.data(), num_read);
  }
  return pclose(pipe) == 0 ? text : "";
}

// A tokenizer whose file is compressed in the data folder; null without the program xz.
std::unique_ptr<Tokenizer> LoadCompressed(const std::string& name) {
  const fs::path folder = DataRoot() / "data/tokenizers" / name;
  TokenizerFiles files;
  files.tokenizer_json = Uncompressed(folder / "tokenizer.json.xz");
  if (files.tokenizer_json->empty()) return nullptr;
  files.tokenizer_config = ReadText(folder / "tokenizer_config.json");
  auto tokenizer = MakeTokenizer(files);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

TEST(TokenizerGoldenTest, Llama3GivesTheIdsOfHuggingFaceAndLlamaCpp) {
  NEED_DATA("data/tokenizers/llama3/tokenizer.json.xz");
  const auto tokenizer = LoadCompressed("llama3");
  if (tokenizer == nullptr) GTEST_SKIP() << "needs the program xz";
  EXPECT_EQ(tokenizer->vocab_size(), 128256);
  EXPECT_EQ(tokenizer->prompt_bos(), 128000);
  ExpectGoldenIds(*tokenizer, "llama3");
  ExpectVectors(*tokenizer, "llama-bpe");
}

TEST(TokenizerGoldenTest, QwenGivesTheIdsOfHuggingFaceAndLlamaCpp) {
  NEED_DATA("data/tokenizers/qwen/tokenizer.json.xz");
  const auto tokenizer = LoadCompressed("qwen");
  if (tokenizer == nullptr) GTEST_SKIP() << "needs the program xz";
  EXPECT_EQ(tokenizer->prompt_bos(), std::nullopt);
  ExpectGoldenIds(*tokenizer, "qwen");
  ExpectVectors(*tokenizer, "qwen2");
}

TEST(TokenizerGoldenTest, Llama2GivesTheIdsOfHuggingFaceAndLlamaCpp) {
  NEED_DATA("data/tokenizers/llama2/tokenizer.json");
  const auto tokenizer = LoadNamed("llama2");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->vocab_size(), 32000);
  EXPECT_EQ((*tokenizer)->prompt_bos(), 1);
  EXPECT_EQ((*tokenizer)->eos(), 2);
  ExpectGoldenIds(**tokenizer, "llama2");
  ExpectVectors(**tokenizer, "llama-spm");
}

// Llama-2 from SentencePiece's own file, with tokenizer_config.json beside it.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadLlama2FromModelFile() {
  const fs::path folder = DataRoot() / "data/tokenizers/llama2";
  TokenizerFiles files;
  files.tokenizer_model = ReadText(folder / "tokenizer.model");
  files.tokenizer_config = ReadText(folder / "tokenizer_config.json");
  return MakeTokenizer(files);
}

TEST(TokenizerGoldenTest, Llama2FromSentencePiecesFileGivesTheSameGoldenIds) {
  NEED_DATA("data/tokenizers/llama2/tokenizer.model");
  const auto tokenizer = LoadLlama2FromModelFile();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->vocab_size(), 32000);
  EXPECT_EQ((*tokenizer)->prompt_bos(), 1);
  EXPECT_EQ((*tokenizer)->eos(), 2);
  ExpectGoldenIds(**tokenizer, "llama2");
  ExpectVectors(**tokenizer, "llama-spm");
}

// Lines of prose, all code points, and bytes that are mostly not UTF-8.
std::vector<std::string> ManyTexts() {
  std::vector<std::string> texts;
  std::ifstream prose(DataRoot() / "data/wikitext2/wiki.test.raw");
  for (std::string line; std::getline(prose, line);) texts.push_back(line);
  std::string block;
  for (uint32_t c = 0; c <= kMaxCodePoint; ++c) {
    if (c < 0xD800 || c > 0xDFFF) AppendUtf8(c, &block);
    if (c % 4096 == 4095) texts.push_back(std::exchange(block, ""));
  }
  std::mt19937 random(11);
  for (int i = 0; i < 2000; ++i) {
    std::string text(random() % 200, 0);
    // Half of the texts from the bytes that sentencepieces and their markers are made of.
    constexpr std::string_view kFew = "aab<s>/ \n\xE2\x96\x81\xC3\xA9";
    for (char& c : text) {
      c = i % 2 == 0 ? static_cast<char>(random()) : kFew[random() % kFew.size()];
    }
    texts.push_back(text);
  }
  return texts;
}

TEST(TokenizerGoldenTest, Llama2FromSentencePiecesFileIsTheTokenizerOfItsJson) {
  NEED_DATA("data/tokenizers/llama2/tokenizer.model");
  NEED_DATA("data/wikitext2/wiki.test.raw");
  const auto from_json = LoadNamed("llama2");
  const auto from_model = LoadLlama2FromModelFile();
  ASSERT_TRUE(from_json.ok()) << from_json.status();
  ASSERT_TRUE(from_model.ok()) << from_model.status();
  const std::vector<std::string> texts = ManyTexts();
  ASSERT_GT(texts.size(), 6000U);
  int num_different = 0;
  for (const std::string& text : texts) {
    for (const SpecialText special : {SpecialText::kPlain, SpecialText::kRecognised}) {
      if ((*from_json)->Encode(text, special) == (*from_model)->Encode(text, special)) continue;
      if (++num_different <= 3) ADD_FAILURE() << "different ids for: " << text;
    }
  }
  EXPECT_EQ(num_different, 0);
  for (int32_t id = 0; id < 32000; ++id) {
    ASSERT_EQ((*from_json)->TokenBytes(id), (*from_model)->TokenBytes(id)) << id;
    ASSERT_EQ((*from_json)->IsSpecial(id), (*from_model)->IsSpecial(id)) << id;
  }
}

TEST(TokenizerGoldenTest, StoryModelPromptsAreThoseOfItsReference) {
  NEED_DATA("models/story-22m/reference.json");
  const auto tokenizer = LoadNamed("story-22m");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->prompt_bos(), 0);
  EXPECT_EQ((*tokenizer)->eos(), 0);
  EXPECT_EQ((*tokenizer)->vocab_size(), 8192);
  const Json reference = Json::parse(ReadText(DataRoot() / "models/story-22m/reference.json"));
  ASSERT_FALSE(reference["greedy"].empty());
  for (const Json& entry : reference["greedy"]) {
    std::vector<int32_t> ids{*(*tokenizer)->prompt_bos()};
    for (const int32_t id :
         (*tokenizer)->Encode(entry["prompt"].get<std::string>(), SpecialText::kPlain)) {
      ids.push_back(id);
    }
    EXPECT_THAT(ids, ElementsAreArray(entry["prompt_ids"].get<std::vector<int32_t>>()));
    IncrementalDetokenizer detokenizer(tokenizer->get());
    std::string text;
    for (const Json& id : entry["output_ids"]) text += detokenizer.Append(id.get<int32_t>());
    text += detokenizer.Flush();
    EXPECT_EQ(text, entry["text"].get<std::string>());
  }
}

// Row R43 for vocabularies that have all bytes (SmolLM2's lacks 21 of them).
TEST(TokenizerGoldenTest, AllCodePointsComeBackFromRealVocabularies) {
  NEED_DATA("data/tokenizers/gpt2/vocab.json");
  NEED_DATA("models/story-22m/tokenizer.json");
  std::string text;
  for (uint32_t c = 0; c <= kMaxCodePoint; ++c) {
    if (c < 0xD800 || c > 0xDFFF) AppendUtf8(c, &text);
  }
  for (const char* name : {"gpt2", "opt", "story-22m"}) {
    const auto tokenizer = LoadNamed(name);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    std::string decoded;
    for (const int32_t id : (*tokenizer)->Encode(text, SpecialText::kPlain)) {
      decoded += (*tokenizer)->TokenBytes(id);
    }
    EXPECT_TRUE(decoded == text) << name;
  }
}

// What the tokenizer adds in front of a text comes back too.
void ExpectUnderASecond(const Tokenizer& tokenizer, const std::string& name,
                        const std::string& prefix) {
  for (const std::string& unit : std::vector<std::string>{
           "a", " ", "\n", "=", "0", "\xF0\x9F\x98\x80", "a1 !\xC3\xA9", "ab"}) {
    std::string text;
    while (text.size() < (size_t{1} << 20)) text += unit;
    const std::clock_t start = std::clock();
    const std::vector<int32_t> ids = tokenizer.Encode(text, SpecialText::kPlain);
    const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    std::string decoded;
    for (const int32_t id : ids) decoded += tokenizer.TokenBytes(id);
    EXPECT_TRUE(decoded == prefix + text) << name << " " << unit;
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    EXPECT_LT(seconds, 1.0) << name << ", unit " << unit;
#endif
    std::printf("%s %-8s %.3f s\n", name.c_str(), unit == "\n" ? "\\n" : unit.c_str(), seconds);
  }
}

// Row R42 with real merges, where runs of one character are tokens.
TEST(TokenizerGoldenTest, MebibyteOfOneKindTakesUnderASecondWithRealMerges) {
  NEED_DATA("data/tokenizers/gpt2/vocab.json");
  const auto tokenizer = LoadNamed("gpt2");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  ExpectUnderASecond(**tokenizer, "gpt2", "");
}

// Row R42 where nothing cuts the text into pieces first.
TEST(TokenizerGoldenTest, MebibyteOfOneKindTakesUnderASecondWithSentencePiecesFile) {
  NEED_DATA("data/tokenizers/llama2/tokenizer.model");
  const auto tokenizer = LoadLlama2FromModelFile();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  ExpectUnderASecond(**tokenizer, "llama2", " ");
}

}  // namespace
}  // namespace flashquant
