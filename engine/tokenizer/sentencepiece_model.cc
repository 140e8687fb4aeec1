// Symbols are places in the piece and not ids, because a character that is no piece itself can
// still be part of one.
#include "engine/tokenizer/sentencepiece_model.h"

#include <algorithm>
#include <functional>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"
#include "engine/tokenizer/bpe_model.h"
#include "engine/tokenizer/normalizer.h"
#include "engine/tokenizer/unicode.h"

namespace flashquant {
namespace {

using Kind = SentencepiecePiece::Kind;

constexpr int32_t kCharacter = -1;  // id of a symbol that is not a user-defined piece

// Ranks by falling score.
std::vector<float> DistinctScores(const SentencepieceFile& file) {
  std::vector<float> scores;
  scores.reserve(file.pieces.size());
  for (const SentencepiecePiece& piece : file.pieces) {
    if (piece.kind == Kind::kNormal) scores.push_back(piece.score);
  }
  std::sort(scores.begin(), scores.end(), std::greater<>());
  scores.erase(std::unique(scores.begin(), scores.end()), scores.end());
  return scores;
}

}  // namespace

SentencepieceModel::SentencepieceModel(const SentencepieceFile& file,
                                       std::span<const int32_t> control)
    : byte_fallback_(file.byte_fallback), unknown_id_(file.unknown_id) {
  const std::vector<float> scores = DistinctScores(file);
  const absl::flat_hash_set<int32_t> is_control(control.begin(), control.end());
  by_text_.reserve(file.pieces.size());
  id_by_content_.reserve(file.pieces.size());
  token_bytes_.reserve(file.pieces.size());
  for (const SentencepiecePiece& piece : file.pieces) {
    const int32_t id = vocab_size();
    id_by_content_.emplace(piece.content, id);
    token_bytes_.push_back(ReplaceAll(piece.content, kVisibleSpace, " "));
    if (piece.kind == Kind::kByte) {
      const auto byte = static_cast<uint8_t>(ByteOfFallback(piece.content));
      byte_ids_[byte] = id;
      token_bytes_.back().assign(1, static_cast<char>(byte));
    } else if (is_control.contains(id)) {
      continue;
    } else if (piece.kind == Kind::kUserDefined) {
      user_defined_.Add(piece.content, id);
    } else if (piece.kind == Kind::kNormal) {
      const auto rank =
          std::lower_bound(scores.begin(), scores.end(), piece.score, std::greater<>());
      by_text_.emplace(piece.content,
                       MergedPiece{id, static_cast<uint32_t>(rank - scores.begin())});
      longest_merged_ = std::max(longest_merged_, piece.content.size());
    }
  }
}

std::optional<int32_t> SentencepieceModel::TokenId(std::string_view content) const {
  const auto it = id_by_content_.find(absl::string_view(content.data(), content.size()));
  if (it == id_by_content_.end()) return std::nullopt;
  return it->second;
}

const SentencepieceModel::MergedPiece* SentencepieceModel::Find(std::string_view text) const {
  if (text.size() > longest_merged_) return nullptr;
  const auto it = by_text_.find(absl::string_view(text.data(), text.size()));
  return it == by_text_.end() ? nullptr : &it->second;
}

void SentencepieceModel::SplitIntoSymbols(std::string_view piece, MergeScratch* scratch) const {
  scratch->ids.clear();
  scratch->begin.clear();
  for (size_t pos = 0; pos < piece.size();) {
    scratch->begin.push_back(static_cast<uint32_t>(pos));
    size_t end = pos + DecodeUtf8(piece, pos).num_bytes;
    const int32_t id = user_defined_.Longest(piece, pos, &end);
    scratch->ids.push_back(id >= 0 ? id : kCharacter);
    pos = end;
  }
}

void SentencepieceModel::EncodePiece(std::string_view piece, MergeScratch* scratch,
                                     std::vector<int32_t>* ids) const {
  if (piece.empty()) return;
  SplitIntoSymbols(piece, scratch);
  const std::vector<int32_t>& user_defined = scratch->ids;
  const std::vector<uint32_t>& begin = scratch->begin;
  const std::vector<uint32_t>& next = scratch->next;
  const auto end_of = [&](uint32_t i) {
    return next[i] == kNoSymbol ? piece.size() : size_t{begin[next[i]]};
  };
  const auto rank_of = [&](uint32_t i) {
    if (user_defined[i] != kCharacter || user_defined[next[i]] != kCharacter) return kNoMerge;
    const MergedPiece* merged = Find(piece.substr(begin[i], end_of(next[i]) - begin[i]));
    return merged == nullptr ? kNoMerge : merged->rank;
  };
  MergeSymbols(
      static_cast<uint32_t>(begin.size()), rank_of, [](uint32_t, uint32_t) {}, scratch);
  bool after_unknown = false;
  for (uint32_t i = 0; i != kNoSymbol; i = next[i]) {
    const std::string_view text = piece.substr(begin[i], end_of(i) - begin[i]);
    const MergedPiece* merged = user_defined[i] == kCharacter ? Find(text) : nullptr;
    const bool is_unknown = user_defined[i] == kCharacter && merged == nullptr;
    if (!is_unknown) {
      ids->push_back(merged != nullptr ? merged->id : user_defined[i]);
    } else if (byte_fallback_) {
      for (const char byte : text) ids->push_back(byte_ids_[static_cast<uint8_t>(byte)]);
    } else if (!after_unknown) {
      ids->push_back(unknown_id_);
    }
    after_unknown = is_unknown;
  }
}

}  // namespace flashquant
