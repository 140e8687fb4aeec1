// SentencepieceModel: BPE as SentencePiece does it. Any two neighbours merge whose joined text is a
// piece, the piece of the highest score first, the leftmost of equal ones; so there is no list of
// merges. User-defined pieces are found first, whole, and merge with nothing.
//
// Source: SentencePiece's bpe_model.cc and prefix matcher. Deviation: its library turns a byte that
// is not UTF-8 into U+FFFD; here it falls back to its byte piece, as everywhere in this tokenizer.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/tokenizer/byte_trie.h"
#include "engine/tokenizer/sentencepiece_file.h"
#include "engine/tokenizer/subword_model.h"

namespace flashquant {

// Immutable; any thread.
class SentencepieceModel final : public SubwordModel {
 public:
  // `control`: ids of pieces that no text becomes, besides the control pieces of the file.
  SentencepieceModel(const SentencepieceFile& file, std::span<const int32_t> control);

  // `piece` has visible spaces for spaces already (normalizer.h). A character without a piece
  // becomes its bytes' pieces, else the unknown piece, one for a run of them.
  void EncodePiece(std::string_view piece, MergeScratch* scratch,
                   std::vector<int32_t>* ids) const override;

  int32_t vocab_size() const override { return static_cast<int32_t>(token_bytes_.size()); }
  bool HasId(int32_t id) const override { return id >= 0 && id < vocab_size(); }
  std::string_view TokenBytes(int32_t id) const override {
    return token_bytes_[static_cast<size_t>(id)];
  }
  std::optional<int32_t> TokenId(std::string_view content) const override;

 private:
  struct MergedPiece {
    int32_t id = 0;
    uint32_t rank = 0;  // equal for equal scores
  };

  void SplitIntoSymbols(std::string_view piece, MergeScratch* scratch) const;
  const MergedPiece* Find(std::string_view text) const;

  bool byte_fallback_ = false;
  int32_t unknown_id_ = 0;
  size_t longest_merged_ = 0;                                // bytes
  absl::flat_hash_map<std::string, MergedPiece> by_text_;    // the normal pieces
  absl::flat_hash_map<std::string, int32_t> id_by_content_;  // all pieces
  ByteTrie user_defined_;                                    // with their ids
  std::array<int32_t, 256> byte_ids_{};
  std::vector<std::string> token_bytes_;  // by id
};

}  // namespace flashquant
