// SubwordModel: the vocabulary of a tokenizer and how one piece of text becomes ids of it. No
// pre-tokenizing, no added tokens, no files.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/tokenizer/bpe_merge.h"

namespace flashquant {

// Immutable; any thread.
class SubwordModel {
 public:
  virtual ~SubwordModel() = default;

  // Appends the ids of one piece, which is at most 1 GiB of any bytes: time O(n log n) in them.
  virtual void EncodePiece(std::string_view piece, MergeScratch* scratch,
                           std::vector<int32_t>* ids) const = 0;

  // One more than the greatest id.
  virtual int32_t vocab_size() const = 0;
  // Whether any number is the id of a token: there may be holes, which added tokens fill.
  virtual bool HasId(int32_t id) const = 0;
  // Raw bytes of a token, for 0 <= id < vocab_size(); "" for holes. Valid as long as the model.
  virtual std::string_view TokenBytes(int32_t id) const = 0;
  // By the content as the file spells it.
  virtual std::optional<int32_t> TokenId(std::string_view content) const = 0;
};

}  // namespace flashquant
