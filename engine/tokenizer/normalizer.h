// Normalizer: what is done to text before it is cut into pieces: NFC, a prepended marker, replaced
// strings. The kinds that the supported families use; others are refused where they are read.
//
// Source: Hugging Face tokenizers' normalizers of the same names; NFC after Unicode annex 15
// through utf8proc; trimming after SentencePiece's remove_extra_whitespaces.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace flashquant {

struct NormalizerStage {
  // kTrimSpaces: none at the ends, one of each run; at the end of the text also visible spaces.
  enum class Kind : uint8_t { kNfc, kPrepend, kReplace, kTrimSpaces };
  Kind kind = Kind::kNfc;
  std::string pattern;  // kReplace: what is replaced, not empty
  std::string content;  // kReplace, kPrepend
};

// Immutable; any thread.
class Normalizer final {
 public:
  Normalizer() = default;
  explicit Normalizer(std::vector<NormalizerStage> stages) : stages_(std::move(stages)) {}

  bool empty() const { return stages_.empty(); }
  // Any bytes; those that are not UTF-8 stay as they are. Time linear in the text. An empty text
  // stays empty.
  std::string Apply(std::string_view text) const;

 private:
  std::vector<NormalizerStage> stages_;
};

// Canonical composition. Deviation: composing starts anew after 256 characters without a place to
// cut (the standard's stream-safe limit is 30 marks in a row), so that hostile runs of combining
// marks stay linear.
std::string ComposeNfc(std::string_view text);

// Sentencepiece's visible space, U+2581.
inline constexpr std::string_view kVisibleSpace = "\xE2\x96\x81";

// `text` with every `pattern` (not empty) replaced by `content`, from the left.
std::string ReplaceAll(std::string_view text, std::string_view pattern, std::string_view content);

}  // namespace flashquant
