// The search walks the trie from every place where a token could start; a discarded match
// (single_word) is skipped as a whole, as the library it follows does.
#include "engine/tokenizer/added_tokens.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// Where the character that ends before `pos` (> 0) starts; `pos - 1` for bytes that are not UTF-8.
size_t PreviousChar(std::string_view text, size_t pos) {
  for (size_t back = 1; back <= 4 && back <= pos; ++back) {
    const DecodedChar c = DecodeUtf8(text.substr(0, pos), pos - back);
    if (c.valid && c.num_bytes == back) return pos - back;
  }
  return pos - 1;
}

}  // namespace

absl::StatusOr<AddedTokens> AddedTokens::Create(std::vector<AddedToken> tokens,
                                                const std::string& file) {
  const std::string where = file + ": added_tokens";
  if (static_cast<int64_t>(tokens.size()) > kMaxTokens) {
    return DataLossError("{}: too many (limit {}, got {})", where, kMaxTokens, tokens.size());
  }
  AddedTokens added;
  FQ_ASSIGN_OR_RETURN(added.classes_, UnicodeClasses::Get());
  absl::flat_hash_set<int32_t> ids;
  for (const AddedToken& token : tokens) {
    const auto index = static_cast<int32_t>(added.index_by_content_.size());
    if (token.content.empty()) return DataLossError("{}: id {} has no text", where, token.id);
    if (static_cast<int64_t>(token.content.size()) > kMaxContentBytes) {
      return DataLossError("{}: id {} too long (limit {} bytes, got {})", where, token.id,
                           kMaxContentBytes, token.content.size());
    }
    if (!ids.insert(token.id).second) {
      return DataLossError("{}: id {} appears twice", where, token.id);
    }
    if (!added.index_by_content_.emplace(token.content, index).second) {
      return DataLossError("{}: the token of id {} appears twice", where, token.id);
    }
    (token.normalized ? added.normalized_ : added.raw_)
        .Add(token.pattern.empty() ? token.content : token.pattern, index);
  }
  added.tokens_ = std::move(tokens);
  return added;
}

int32_t AddedTokens::Find(std::string_view content) const {
  const auto it = index_by_content_.find(absl::string_view(content.data(), content.size()));
  return it == index_by_content_.end() ? -1 : it->second;
}

std::vector<AddedTokens::Piece> AddedTokens::SplitRaw(std::string_view text) const {
  std::vector<Piece> pieces;
  SplitBy(raw_, text, &pieces);
  return pieces;
}

std::vector<AddedTokens::Piece> AddedTokens::SplitNormalized(std::string_view text) const {
  std::vector<Piece> pieces;
  SplitBy(normalized_, text, &pieces);
  return pieces;
}

void AddedTokens::SplitBy(const ByteTrie& trie, std::string_view text,
                          std::vector<Piece>* pieces) const {
  size_t copied = 0;  // what is before it is in `pieces`
  size_t pos = 0;
  while (pos < text.size()) {
    size_t end = pos;
    const int32_t index = trie.Longest(text, pos, &end);
    if (index < 0) {
      ++pos;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    size_t start = pos;
    pos = end;
    if (token.single_word && (HasWordBefore(text, start) || HasWordAt(text, end))) continue;
    while (token.lstrip && start > copied && IsSpaceAt(text, PreviousChar(text, start))) {
      start = PreviousChar(text, start);
    }
    while (token.rstrip && end < text.size() && IsSpaceAt(text, end)) {
      end += DecodeUtf8(text, end).num_bytes;
    }
    pos = end;
    if (start > copied) pieces->push_back({text.substr(copied, start - copied), -1});
    pieces->push_back({text.substr(start, end - start), token.id});
    copied = end;
  }
  if (copied < text.size()) pieces->push_back({text.substr(copied), -1});
}

bool AddedTokens::HasWordAt(std::string_view text, size_t pos) const {
  return pos < text.size() && (classes_->Of(DecodeUtf8(text, pos)) & UnicodeClasses::kWord);
}

bool AddedTokens::HasWordBefore(std::string_view text, size_t pos) const {
  return pos > 0 && HasWordAt(text, PreviousChar(text, pos));
}

bool AddedTokens::IsSpaceAt(std::string_view text, size_t pos) const {
  return (classes_->Of(DecodeUtf8(text, pos)) & UnicodeClasses::kSpace) != 0;
}

}  // namespace flashquant
