// Puts a tokenizer together from the texts of its files; LoadTokenizer (tokenizer.h) reads them
// from a folder and calls this.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/tokenizer/tokenizer.h"

namespace flashquant {

// Contents of files; tokenizer_json wins over the older pair, the pair over tokenizer_model.
struct TokenizerFiles {
  std::optional<std::string> tokenizer_json;
  std::optional<std::string> vocab_json;
  std::optional<std::string> merges_txt;
  std::optional<std::string> tokenizer_model;    // SentencePiece's
  std::optional<std::string> added_tokens_json;  // read with tokenizer_model only
  std::optional<std::string> tokenizer_config;
};

// NOT_FOUND when there is no vocabulary. DATA_LOSS and UNIMPLEMENTED as
// LoadTokenizer. Beyond what tokenizer_parts.h and bpe_model.h check: ids have no holes over model
// and added tokens together, an added token agrees with the model about its id, and BOS and EOS are
// in the vocabulary.
absl::StatusOr<std::unique_ptr<Tokenizer>> MakeTokenizer(const TokenizerFiles& files);

}  // namespace flashquant
