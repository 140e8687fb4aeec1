// BpeModel: the vocabulary and merges of a BPE tokenizer, byte-level or of characters with a
// fallback to bytes, and the merging of one piece. No pre-tokenizing, no added tokens, no files.
//
// Source: Sennrich et al. 2016 (BPE for translation); byte-level spelling after GPT-2's
// published encoder. The order of merges (lowest rank first, leftmost among equals) is that of
// Hugging Face tokenizers.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/tokenizer/subword_model.h"

namespace flashquant {

inline constexpr int64_t kMaxVocabulary = int64_t{1} << 20;
inline constexpr int64_t kMaxMerges = int64_t{1} << 21;
inline constexpr int64_t kMaxTokenBytes = 4096;  // of one vocabulary entry as spelled in the file

// A vocabulary entry or merge as the file spells it.
struct VocabularyEntry {
  std::string content;
  int32_t id = 0;
};
using MergeRule = std::pair<std::string, std::string>;

// The bytes that a byte-level spelling stands for ("Ġthe" is " the"), nullopt when a character of
// `spelled` is outside that alphabet.
std::optional<std::string> BytesOfSpelling(std::string_view spelled);
// The reverse.
std::string SpellingOfBytes(std::string_view bytes);
// The byte that "<0xA7>" stands for in vocabularies of characters, -1 for any other text.
int ByteOfFallback(std::string_view content);

// What the entries of a vocabulary are spelled in.
enum class BpeAlphabet : uint8_t {
  kBytes,       // GPT-2's printable characters, one for each byte
  kCharacters,  // UTF-8 text, as sentencepiece has it; merging starts from characters
};

// Immutable after Create; any thread.
class BpeModel final : public SubwordModel {
 public:
  struct Options {
    BpeAlphabet alphabet = BpeAlphabet::kBytes;
    // kCharacters: a character without a token becomes its bytes' tokens "<0x00>" to "<0xFF>"
    // (all must be there), else `unk_token`, one for a run of them with fuse_unk.
    bool byte_fallback = false;
    std::string unk_token;
    bool fuse_unk = false;
    // kCharacters: how the decoder undoes the normalizer in a token's text; empty: not at all.
    std::string shown_pattern;
    std::string shown_content;
    bool ignore_merges = false;    // a piece that is a token is not built from merges
    bool may_drop_bytes = true;    // false: every byte must have a token
    std::string file;              // name for messages
    std::vector<int32_t> control;  // ids of special tokens: merging must not produce them
  };
  // `entries` in any order. DATA_LOSS "‹file›: model.vocab: …" / "model.merges: …" for an empty
  // vocabulary, an empty or repeated content, an id repeated or outside [0, kMaxVocabulary), too
  // many entries or merges, a merge that names or makes an unknown token, that is repeated or that
  // makes a control token. Ids may have holes here: added tokens may fill them.
  static absl::StatusOr<BpeModel> Create(std::vector<VocabularyEntry> entries,
                                         const std::vector<MergeRule>& merges,
                                         const Options& options);

  // A byte or character without a token and fallback is dropped, as Hugging Face does without an
  // unk_token. In an alphabet of characters a byte that is not UTF-8 is a character.
  void EncodePiece(std::string_view piece, MergeScratch* scratch,
                   std::vector<int32_t>* ids) const override;

  int32_t vocab_size() const override { return static_cast<int32_t>(token_bytes_.size()); }
  bool HasId(int32_t id) const override;
  // An entry spelled outside the byte-level alphabet gives its UTF-8 text, as the decoder shows it.
  std::string_view TokenBytes(int32_t id) const override {
    return token_bytes_[static_cast<size_t>(id)];
  }
  std::optional<int32_t> TokenId(std::string_view content) const override;
  // Bytes that no token stands for. kCharacters without byte_fallback: 256.
  int num_missing_bytes() const;

 private:
  BpeModel() = default;
  absl::Status AddEntries(std::vector<VocabularyEntry> entries, const Options& options);
  void AddSpelling(const VocabularyEntry& entry, bool is_control, const Options& options);
  absl::Status CheckAlphabet(const Options& options);
  absl::Status AddMerges(const std::vector<MergeRule>& merges, const Options& options);
  uint32_t RankOf(int32_t left, int32_t right) const;
  void AppendCharacters(std::string_view piece, std::vector<int32_t>* ids) const;
  void Merge(MergeScratch* scratch) const;

  BpeAlphabet alphabet_ = BpeAlphabet::kBytes;
  bool byte_fallback_ = false;
  bool fuse_unk_ = false;
  int32_t unk_id_ = -1;
  absl::flat_hash_map<std::string, int32_t> id_by_content_;
  absl::flat_hash_map<std::string, int32_t> id_by_bytes_;  // filled for ignore_merges only
  std::vector<std::string> token_bytes_;                   // by id
  std::vector<bool> has_id_;                               // by id
  std::array<int32_t, 256> byte_ids_{};                    // -1: no token
  absl::flat_hash_map<uint64_t, uint32_t> rank_by_pair_;   // left id << 32 | right id
  std::vector<int32_t> merged_by_rank_;
};

}  // namespace flashquant
