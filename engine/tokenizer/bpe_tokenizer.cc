// Nothing is cached between calls: the tokenizer is shared by threads, and merging is quick enough
// without (1 MiB of prose: about 0.1 s of one core).
#include "engine/tokenizer/bpe_tokenizer.h"

#include <algorithm>
#include <string>

namespace flashquant {
namespace {

// Longer pieces are cut, so that positions fit in 32 bits.
constexpr size_t kMaxPieceBytes = size_t{1} << 30;

}  // namespace

BpeTokenizer::BpeTokenizer(std::unique_ptr<const SubwordModel> model, AddedTokens added,
                           Normalizer normalizer, PreTokenizer pre_tokenizer,
                           const SpecialIds& special_ids)
    : model_(std::move(model)),
      added_(std::move(added)),
      normalizer_(std::move(normalizer)),
      pre_tokenizer_(std::move(pre_tokenizer)),
      special_ids_(special_ids),
      vocab_size_(model_->vocab_size()) {
  for (size_t i = 0; i < added_.tokens().size(); ++i) {
    const int32_t id = added_.tokens()[i].id;
    added_index_by_id_.emplace(id, static_cast<int32_t>(i));
    vocab_size_ = std::max(vocab_size_, id + 1);
  }
}

std::vector<int32_t> BpeTokenizer::Encode(std::string_view text, SpecialText special) const {
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 1);
  MergeScratch scratch;
  const auto normalized = [&](std::string_view part, std::string* storage) {
    if (normalizer_.empty()) return part;
    *storage = normalizer_.Apply(part);
    return std::string_view(*storage);
  };
  std::string storage;
  if (special == SpecialText::kPlain) {
    EncodeText(normalized(text, &storage), /*at_start=*/true, &scratch, &ids);
    return ids;
  }
  bool at_start = true;
  for (const AddedTokens::Piece& raw : added_.SplitRaw(text)) {
    if (raw.id >= 0) {
      ids.push_back(raw.id);
      at_start = false;
      continue;
    }
    for (const AddedTokens::Piece& piece : added_.SplitNormalized(normalized(raw.text, &storage))) {
      if (piece.id >= 0) {
        ids.push_back(piece.id);
      } else {
        EncodeText(piece.text, at_start, &scratch, &ids);
      }
      at_start = false;
    }
  }
  return ids;
}

void BpeTokenizer::EncodeText(std::string_view text, bool at_start, MergeScratch* scratch,
                              std::vector<int32_t>* ids) const {
  pre_tokenizer_.Split(text, at_start, [&](std::string_view piece) {
    for (size_t pos = 0; pos < piece.size(); pos += kMaxPieceBytes) {
      model_->EncodePiece(piece.substr(pos, kMaxPieceBytes), scratch, ids);
    }
  });
}

std::string_view BpeTokenizer::TokenBytes(int32_t id) const {
  if (const auto it = added_index_by_id_.find(id); it != added_index_by_id_.end()) {
    return added_.tokens()[static_cast<size_t>(it->second)].content;
  }
  if (id < 0 || id >= model_->vocab_size()) return "";
  return model_->TokenBytes(id);
}

bool BpeTokenizer::IsSpecial(int32_t id) const {
  const auto it = added_index_by_id_.find(id);
  return it != added_index_by_id_.end() && added_.tokens()[static_cast<size_t>(it->second)].special;
}

std::optional<int32_t> BpeTokenizer::TokenId(std::string_view content) const {
  if (const int32_t index = added_.Find(content); index >= 0) {
    return added_.tokens()[static_cast<size_t>(index)].id;
  }
  return model_->TokenId(content);
}

}  // namespace flashquant
