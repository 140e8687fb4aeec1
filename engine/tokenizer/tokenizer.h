// Tokenizer: text to token ids and back. Immutable after load, safe from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace flashquant {

enum class SpecialText {
  kPlain,       // text that spells an added token is ordinary text (prompts of clients)
  kRecognised,  // added tokens in the text become their ids (`flashquant tokenize`)
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Ids of `text`, no BOS or EOS added. Terminates, in time linear in the text, for any bytes;
  // bytes that are not UTF-8 are encoded byte by byte.
  virtual std::vector<int32_t> Encode(std::string_view text, SpecialText special) const = 0;

  // The raw bytes that a token stands for (byte-level vocabularies: any bytes, perhaps part of a
  // code point). Special tokens give their text; ids without a token give "". Valid as long as the
  // tokenizer.
  virtual std::string_view TokenBytes(int32_t id) const = 0;
  // True for added tokens marked special: they are not part of an answer's text.
  virtual bool IsSpecial(int32_t id) const = 0;

  // Id of a token by its content ("<|im_start|>"), for chat formats.
  virtual std::optional<int32_t> TokenId(std::string_view content) const = 0;

  // One more than the greatest id.
  virtual int32_t vocab_size() const = 0;
  // Prepended to a prompt when the tokenizer's post-processor, else add_bos_token, says so; a
  // tokenizer.model without either has it.
  virtual std::optional<int32_t> prompt_bos() const = 0;
  virtual std::optional<int32_t> bos() const = 0;
  virtual std::optional<int32_t> eos() const = 0;
};

// Reads tokenizer.json (where that is missing vocab.json + merges.txt, or SentencePiece's
// tokenizer.model + added_tokens.json) and tokenizer_config.json in `dir`. NOT_FOUND when there is
// none of them; DATA_LOSS for broken files; UNIMPLEMENTED naming a model, pre-tokenizer, normalizer
// or decoder that we do not know: never a silent approximation.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& dir);

}  // namespace flashquant
