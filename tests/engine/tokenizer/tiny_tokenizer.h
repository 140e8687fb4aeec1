// A byte-level tokenizer small enough to check by hand, as the text of a tokenizer.json: the 256
// bytes as ids 0..255 in byte order, a few merges from 256 on, then control tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/tokenizer_loader.h"
#include "kernels/base/check.h"
#include "nlohmann/json.hpp"

namespace flashquant {

// How byte-level vocabularies spell one byte. Written apart from the code under test, from the
// description: bytes that print in Latin-1 stand for themselves, others for U+0100 + their rank.
inline std::string SpelledByte(int byte) {
  const auto prints = [](int b) { return (b > 32 && b < 127) || (b > 160 && b != 173); };
  int code_point = byte;
  if (!prints(byte)) {
    code_point = 256;
    for (int b = 0; b < byte; ++b) code_point += prints(b) ? 0 : 1;
  }
  if (code_point < 128) return std::string(1, static_cast<char>(code_point));
  return {static_cast<char>(0xC0 | (code_point >> 6)),
          static_cast<char>(0x80 | (code_point & 0x3F))};
}

inline std::string Spelled(const std::string& bytes) {
  std::string spelled;
  for (const char c : bytes) spelled += SpelledByte(static_cast<unsigned char>(c));
  return spelled;
}

// Ids: merges[i] makes 256 + i, added token j is 256 + merges.size() + j.
inline nlohmann::json TinyTokenizerJson(
    const std::vector<std::pair<std::string, std::string>>& merges,
    const std::vector<std::string>& control_tokens) {
  nlohmann::json vocab;
  for (int b = 0; b < 256; ++b) vocab[SpelledByte(b)] = b;
  nlohmann::json rules = nlohmann::json::array();
  int next = 256;
  for (const auto& [left, right] : merges) {
    rules.push_back(nlohmann::json::array({Spelled(left), Spelled(right)}));
    vocab[Spelled(left + right)] = next++;
  }
  nlohmann::json added = nlohmann::json::array();
  for (const std::string& content : control_tokens) {
    added.push_back({{"id", next++}, {"content", content}, {"special", true}});
  }
  return {
      {"added_tokens", added},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", rules}}}};
}

inline absl::StatusOr<std::unique_ptr<Tokenizer>> MakeFromJson(
    const nlohmann::json& tokenizer, const nlohmann::json& config = nullptr) {
  TokenizerFiles files;
  files.tokenizer_json = tokenizer.dump();
  if (!config.is_null()) files.tokenizer_config = config.dump();
  return MakeTokenizer(files);
}

// Merges "th", "the", " the", "aa", "aaaa"; control tokens 261 "<|im_start|>", 262 "<|im_end|>",
// 263 "<|endoftext|>", the last as BOS and EOS.
inline std::unique_ptr<Tokenizer> TinyTokenizer() {
  auto tokenizer = MakeFromJson(
      TinyTokenizerJson({{"t", "h"}, {"th", "e"}, {" ", "the"}, {"a", "a"}, {"aa", "aa"}},
                        {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}),
      {{"bos_token", "<|endoftext|>"}, {"eos_token", "<|endoftext|>"}});
  FQ_CHECK(tokenizer.ok());
  return *std::move(tokenizer);
}

}  // namespace flashquant
