#include "engine/checkpoint/gguf_sentencepiece.h"

#include <cmath>
#include <limits>

#include "engine/checkpoint/sentencepiece.pb.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// The same numbers in both formats.
constexpr int64_t kControl = 3;
constexpr int64_t kUnused = 5;
constexpr int64_t kByte = 6;
constexpr int32_t kBpe = 2;

absl::StatusOr<const std::vector<double>*> ReadScores(const GgufFile& gguf, size_t num_tokens) {
  constexpr char kKey[] = "tokenizer.ggml.scores";
  FQ_ASSIGN_OR_RETURN(const std::vector<double>* scores, gguf.GetDoubles(kKey));
  if (scores->size() != num_tokens) {
    return gguf.Error(kKey, fmt::format("must have one value per token (need {}, got {})",
                                        num_tokens, scores->size()));
  }
  for (const double score : *scores) {
    if (std::abs(score) <= std::numeric_limits<float>::max()) continue;  // false for NaN too
    return gguf.Error(kKey, "must be finite numbers");
  }
  return scores;
}

}  // namespace

absl::StatusOr<std::string> SentencepieceFromGguf(const GgufFile& gguf,
                                                  const std::vector<std::string>& tokens,
                                                  const std::vector<int64_t>& types) {
  FQ_ASSIGN_OR_RETURN(const std::vector<double>* scores, ReadScores(gguf, tokens.size()));
  sentencepiece::ModelFile file;
  bool has_bytes = false;
  for (size_t id = 0; id < tokens.size(); ++id) {
    sentencepiece::SentencePiece* piece = file.add_pieces();
    piece->set_piece(tokens[id]);
    piece->set_score(static_cast<float>((*scores)[id]));
    piece->set_type(static_cast<int32_t>(types[id] == kUnused ? kControl : types[id]));
    has_bytes = has_bytes || types[id] == kByte;
  }
  file.mutable_trainer_spec()->set_model_type(kBpe);
  file.mutable_trainer_spec()->set_byte_fallback(has_bytes);
  sentencepiece::NormalizerSpec* normalizer = file.mutable_normalizer_spec();
  FQ_ASSIGN_OR_RETURN(const bool adds_space,
                      gguf.GetBoolOr("tokenizer.ggml.add_space_prefix", true));
  FQ_ASSIGN_OR_RETURN(const bool trims,
                      gguf.GetBoolOr("tokenizer.ggml.remove_extra_whitespaces", false));
  normalizer->set_add_dummy_prefix(adds_space);
  normalizer->set_remove_extra_whitespaces(trims);
  std::string bytes;
  if (!file.SerializeToString(&bytes)) {
    return gguf.Error("tokenizer.ggml.tokens", "too long for a tokenizer.model (limit 2 GiB)");
  }
  return bytes;
}

}  // namespace flashquant
