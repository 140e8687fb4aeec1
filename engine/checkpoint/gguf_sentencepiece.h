// tokenizer.model from the metadata of a GGUF file whose tokenizer is SentencePiece's BPE (kind
// "llama": Llama 2, Mistral, TinyLlama).
//
// Source: the keys and their defaults as llama.cpp reads them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/gguf_file.h"

namespace flashquant {

// `types` has a tokenizer.ggml.token_type of 1..6 for each of `tokens`. Pieces that are marked as
// unused become control pieces: no text becomes them. DATA_LOSS for scores that are missing, not
// one for each token or beyond the range of a float. What else makes the file one that cannot be
// used is found when it is read (engine/tokenizer/sentencepiece_file.h).
absl::StatusOr<std::string> SentencepieceFromGguf(const GgufFile& gguf,
                                                  const std::vector<std::string>& tokens,
                                                  const std::vector<int64_t>& types);

}  // namespace flashquant
