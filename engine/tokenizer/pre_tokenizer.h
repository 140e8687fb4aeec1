// PreTokenizer: cuts text into the pieces inside which BPE merges. Written by hand for the known
// patterns, linear in the text, without recursion over it; no general regular expressions.
//
// Pieces are raw bytes: the detour of byte-level vocabularies through printable characters is
// undone when the vocabulary is loaded (bpe_model.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/normalizer.h"
#include "engine/tokenizer/unicode.h"

namespace flashquant {

// The patterns of byte-level tokenizers that we know. Source: the `pattern` texts in the published
// tokenizer.json files; GPT-2's is built into Hugging Face's ByteLevel.
enum class SplitPattern {
  kNone,
  kGpt2,    // 's|'t|... | ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  kLlama3,  // any one sign before letters, up to three digits together, line ends with signs
  kQwen2,   // as kLlama3, each digit alone
};

// The pattern spelled like `regex` exactly, else nullopt.
std::optional<SplitPattern> KnownSplitPattern(std::string_view regex);

// One element of a tokenizer.json pre_tokenizer.
struct PreTokenizerStage {
  enum class Kind { kDigits, kSplit, kByteLevel, kMetaspace };
  enum class Prepend { kNever, kFirst, kAlways };  // kFirst: at the start of the whole text only
  Kind kind = Kind::kByteLevel;
  bool individual_digits = false;              // kDigits: each number character alone
  SplitPattern pattern = SplitPattern::kNone;  // kSplit; kByteLevel: kGpt2 when use_regex
  bool add_prefix_space = false;               // kByteLevel: " " before a piece without one
  // kMetaspace, which is the only stage: spaces become kMetaspace; one is put before a text that
  // does not start with it; with `split` a piece starts at each.
  Prepend prepend = Prepend::kAlways;
  bool split = true;
};

// Immutable; any thread.
class PreTokenizer final {
 public:
  static constexpr int kMaxStages = 8;
  using Sink = std::function<void(std::string_view piece)>;

  // INVALID_ARGUMENT for more than kMaxStages stages.
  static absl::StatusOr<PreTokenizer> Create(std::vector<PreTokenizerStage> stages);

  // Calls `sink` with the pieces of `text` in order; joined they are `text` (but for added prefix
  // spaces and Metaspace's). at_start: `text` begins the whole text. A piece is valid during its
  // call only. Any bytes; those that are not UTF-8 count as punctuation one by one.
  void Split(std::string_view text, bool at_start, const Sink& sink) const;

 private:
  PreTokenizer(std::vector<PreTokenizerStage> stages, const UnicodeClasses* classes)
      : stages_(std::move(stages)), classes_(classes) {}
  void RunStage(size_t stage, std::string_view piece, const Sink& sink) const;
  static void SplitMetaspace(const PreTokenizerStage& stage, std::string_view text, bool at_start,
                             const Sink& sink);
  void SplitDigits(std::string_view text, bool individual, const Sink& sink) const;

  std::vector<PreTokenizerStage> stages_;
  const UnicodeClasses* classes_;
};

}  // namespace flashquant
