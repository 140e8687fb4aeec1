// SentencepieceFile: what a SentencePiece model file (tokenizer.model) says, parsed and checked; no
// file access. sentencepiece_model.h encodes with it.
//
// Source: SentencePiece's sentencepiece_model.proto and its C++ library, after which kinds,
// defaults and what makes a file broken are taken.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace flashquant {

struct SentencepiecePiece {
  enum class Kind : uint8_t { kNormal, kUnknown, kControl, kUserDefined, kByte };
  std::string content;
  float score = 0;  // finite; the pair that makes the piece of the highest score is merged first
  Kind kind = Kind::kNormal;
};

struct SentencepieceFile {
  std::vector<SentencepiecePiece> pieces;  // by id
  int32_t unknown_id = 0;
  bool byte_fallback = false;  // then all 256 byte pieces are there, else none
  // What is done to a text first.
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  // Contents of pieces; "" where no control piece is called so.
  std::string bos;
  std::string eos;
};

// DATA_LOSS "tokenizer.model: …" for bytes that are no such file, no or too many pieces, pieces
// that are empty, too long, not UTF-8 or there twice, a score that is not finite, not exactly one
// unknown piece, and byte pieces that do not match byte_fallback. UNIMPLEMENTED naming what we do
// not have: models other than BPE, kinds of pieces, normalizers other than identity, white space as
// a suffix or not escaped.
absl::StatusOr<SentencepieceFile> ParseSentencepieceFile(std::string_view bytes);

}  // namespace flashquant
