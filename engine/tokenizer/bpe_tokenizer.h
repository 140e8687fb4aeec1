// BpeTokenizer: BPE behind the Tokenizer interface: added tokens, normalizer, the added tokens that
// are searched after it, pre-tokenizer, merges. Made by tokenizer_loader.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/tokenizer/added_tokens.h"
#include "engine/tokenizer/normalizer.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/subword_model.h"
#include "engine/tokenizer/tokenizer.h"

namespace flashquant {

class BpeTokenizer final : public Tokenizer {
 public:
  // Ids that must be below vocab_size().
  struct SpecialIds {
    std::optional<int32_t> prompt_bos;
    std::optional<int32_t> bos;
    std::optional<int32_t> eos;
  };
  // An added token with an id of the model has the same content there (the loader checks it).
  // Patterns of added tokens with normalized = true are normalised already.
  BpeTokenizer(std::unique_ptr<const SubwordModel> model, AddedTokens added, Normalizer normalizer,
               PreTokenizer pre_tokenizer, const SpecialIds& special_ids);

  std::vector<int32_t> Encode(std::string_view text, SpecialText special) const override;
  std::string_view TokenBytes(int32_t id) const override;
  bool IsSpecial(int32_t id) const override;
  std::optional<int32_t> TokenId(std::string_view content) const override;
  int32_t vocab_size() const override { return vocab_size_; }
  std::optional<int32_t> prompt_bos() const override { return special_ids_.prompt_bos; }
  std::optional<int32_t> bos() const override { return special_ids_.bos; }
  std::optional<int32_t> eos() const override { return special_ids_.eos; }

 private:
  // `text` is normalised; at_start: nothing of the whole text comes before it.
  void EncodeText(std::string_view text, bool at_start, MergeScratch* scratch,
                  std::vector<int32_t>* ids) const;

  const std::unique_ptr<const SubwordModel> model_;
  const AddedTokens added_;
  const Normalizer normalizer_;
  const PreTokenizer pre_tokenizer_;
  const SpecialIds special_ids_;
  absl::flat_hash_map<int32_t, int32_t> added_index_by_id_;
  int32_t vocab_size_ = 0;
};

}  // namespace flashquant
