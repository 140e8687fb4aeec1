// F3: bytes as text. The first byte chooses the pre-tokenizer; every id is below the vocabulary
// size, and what is decoded is the text.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "tests/engine/tokenizer/tiny_tokenizer.h"

namespace {

using flashquant::Tokenizer;

std::unique_ptr<Tokenizer> Make(const nlohmann::json& pre_tokenizer) {
  nlohmann::json json = flashquant::TinyTokenizerJson(
      {{"t", "h"}, {"th", "e"}, {" ", "the"}, {"a", "a"}, {"aa", "aa"}, {"\xC3", "\xA9"}},
      {"<|im_end|>", "<|im_end|>>", "<s>"});
  json["pre_tokenizer"] = pre_tokenizer;
  auto tokenizer = flashquant::MakeFromJson(json);
  if (!tokenizer.ok()) std::abort();
  return *std::move(tokenizer);
}

const std::array<std::unique_ptr<Tokenizer>, 3>& Tokenizers() {
  const nlohmann::json gpt2{{"type", "ByteLevel"}, {"add_prefix_space", false}};
  const nlohmann::json whole{
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  const nlohmann::json digits{{"type", "Digits"}, {"individual_digits", true}};
  static const std::array<std::unique_ptr<Tokenizer>, 3> tokenizers{
      Make(gpt2), Make(whole),
      Make({{"type", "Sequence"}, {"pretokenizers", nlohmann::json::array({digits, gpt2})}})};
  return tokenizers;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  using flashquant::SpecialText;
  if (num_bytes == 0) return 0;
  const Tokenizer& tokenizer = *Tokenizers()[data[0] % Tokenizers().size()];
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, num_bytes - 1);
  for (const SpecialText special : {SpecialText::kPlain, SpecialText::kRecognised}) {
    std::string decoded;
    for (const int32_t id : tokenizer.Encode(text, special)) {
      if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
      if (special == SpecialText::kPlain && tokenizer.IsSpecial(id)) std::abort();
      decoded += tokenizer.TokenBytes(id);
    }
    if (decoded != text) std::abort();
  }
  return 0;
}
