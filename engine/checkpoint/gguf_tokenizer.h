// tokenizer.json and tokenizer_config.json from the metadata of a GGUF file (byte-level BPE only).
//
// Which pre-tokenizer a name stands for is a fixed list; an unknown name is refused, because a
// near miss would change every token id after it.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/checkpoint/gguf_file.h"

namespace flashquant {

struct GgufTokenizerFiles {
  std::string tokenizer_json;
  std::string tokenizer_config_json;  // special tokens, add_bos_token, chat_template
};

// DATA_LOSS for missing or inconsistent metadata, UNIMPLEMENTED "tokenizer: unsupported ‹kind›".
absl::StatusOr<GgufTokenizerFiles> TokenizerFromGguf(const GgufFile& gguf);

}  // namespace flashquant
