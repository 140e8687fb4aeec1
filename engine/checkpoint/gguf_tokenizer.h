// The files of a tokenizer from the metadata of a GGUF file: byte-level BPE becomes a
// tokenizer.json, SentencePiece's BPE a tokenizer.model (gguf_sentencepiece.h).
//
// Which pre-tokenizer a name stands for is a fixed list; an unknown name is refused, because a
// near miss would change every token id after it.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/checkpoint/gguf_file.h"

namespace flashquant {

struct GgufTokenizerFiles {
  std::string tokenizer_json;  // one of the two; the other is empty
  std::string tokenizer_model;
  std::string tokenizer_config_json;  // special tokens, add_bos_token, chat_template
};

// DATA_LOSS for missing or inconsistent metadata, UNIMPLEMENTED "tokenizer: unsupported ‹kind›".
absl::StatusOr<GgufTokenizerFiles> TokenizerFromGguf(const GgufFile& gguf);

}  // namespace flashquant
