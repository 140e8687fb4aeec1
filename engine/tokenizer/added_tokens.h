// AddedTokens: tokens that are found in the text as a whole, before any BPE: control tokens
// ("<|im_end|>") and others that a vocabulary got after training.
//
// The rules are those of Hugging Face tokenizers (AddedVocabulary): tokens with normalized=false
// are searched first, the others in what is left; leftmost, then longest; single_word, lstrip and
// rstrip are honoured. Searching costs at most kMaxContentBytes steps per byte of text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/tokenizer/byte_trie.h"
#include "engine/tokenizer/unicode.h"

namespace flashquant {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool single_word = false;  // only where no word character is next to it
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
  bool normalized = false;
  std::string pattern;  // what is searched; empty: `content`. The normalizer's form of `content`
};

// Immutable; any thread.
class AddedTokens final {
 public:
  static constexpr int64_t kMaxTokens = 1 << 16;
  static constexpr int64_t kMaxContentBytes = 512;

  // DATA_LOSS "‹file›: added_tokens: …" for empty, too long or repeated contents and ids.
  static absl::StatusOr<AddedTokens> Create(std::vector<AddedToken> tokens,
                                            const std::string& file);

  struct Piece {
    std::string_view text;
    int32_t id = -1;  // of the added token; -1: ordinary text
  };
  // `text` in order; its pieces have no gap but the white space that lstrip and rstrip took. Tokens
  // with normalized = false are searched in the raw text, the others in the rest, normalised.
  std::vector<Piece> SplitRaw(std::string_view text) const;
  std::vector<Piece> SplitNormalized(std::string_view text) const;

  const std::vector<AddedToken>& tokens() const { return tokens_; }
  // Index into tokens(), -1 when `content` is none of them.
  int32_t Find(std::string_view content) const;

 private:
  AddedTokens() = default;
  void SplitBy(const ByteTrie& trie, std::string_view text, std::vector<Piece>* pieces) const;
  bool HasWordAt(std::string_view text, size_t pos) const;
  bool HasWordBefore(std::string_view text, size_t pos) const;
  bool IsSpaceAt(std::string_view text, size_t pos) const;

  std::vector<AddedToken> tokens_;
  absl::flat_hash_map<std::string, int32_t> index_by_content_;
  ByteTrie raw_;         // normalized = false
  ByteTrie normalized_;  // normalized = true
  const UnicodeClasses* classes_ = nullptr;
};

}  // namespace flashquant
