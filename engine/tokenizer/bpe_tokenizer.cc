// Nothing is cached between calls: the tokenizer is shared by threads, and merging is quick enough
// without (1 MiB of prose: about 0.1 s of one core).
#include "engine/tokenizer/bpe_tokenizer.h"

#include <algorithm>

namespace flashquant {
namespace {

// Longer pieces are cut, so that positions fit in 32 bits.
constexpr size_t kMaxPieceBytes = size_t{1} << 30;

}  // namespace

BpeTokenizer::BpeTokenizer(BpeModel model, AddedTokens added, PreTokenizer pre_tokenizer,
                           const SpecialIds& special_ids)
    : model_(std::move(model)),
      added_(std::move(added)),
      pre_tokenizer_(std::move(pre_tokenizer)),
      special_ids_(special_ids),
      vocab_size_(model_.vocab_size()) {
  for (size_t i = 0; i < added_.tokens().size(); ++i) {
    const int32_t id = added_.tokens()[i].id;
    added_index_by_id_.emplace(id, static_cast<int32_t>(i));
    vocab_size_ = std::max(vocab_size_, id + 1);
  }
}

std::vector<int32_t> BpeTokenizer::Encode(std::string_view text, SpecialText special) const {
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 1);
  BpeModel::Scratch scratch;
  if (special == SpecialText::kPlain) {
    EncodeText(text, &scratch, &ids);
    return ids;
  }
  for (const AddedTokens::Piece& piece : added_.Split(text)) {
    if (piece.id >= 0) {
      ids.push_back(piece.id);
    } else {
      EncodeText(piece.text, &scratch, &ids);
    }
  }
  return ids;
}

void BpeTokenizer::EncodeText(std::string_view text, BpeModel::Scratch* scratch,
                              std::vector<int32_t>* ids) const {
  pre_tokenizer_.Split(text, [&](std::string_view piece) {
    for (size_t pos = 0; pos < piece.size(); pos += kMaxPieceBytes) {
      model_.EncodePiece(piece.substr(pos, kMaxPieceBytes), scratch, ids);
    }
  });
}

std::string_view BpeTokenizer::TokenBytes(int32_t id) const {
  if (const auto it = added_index_by_id_.find(id); it != added_index_by_id_.end()) {
    return added_.tokens()[static_cast<size_t>(it->second)].content;
  }
  if (id < 0 || id >= model_.vocab_size()) return "";
  return model_.TokenBytes(id);
}

bool BpeTokenizer::IsSpecial(int32_t id) const {
  const auto it = added_index_by_id_.find(id);
  return it != added_index_by_id_.end() && added_.tokens()[static_cast<size_t>(it->second)].special;
}

std::optional<int32_t> BpeTokenizer::TokenId(std::string_view content) const {
  if (const int32_t index = added_.Find(content); index >= 0) {
    return added_.tokens()[static_cast<size_t>(index)].id;
  }
  return model_.TokenId(content);
}

}  // namespace flashquant
