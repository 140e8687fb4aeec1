// IncrementalDetokenizer: output tokens to text, token by token, without ever splitting a code
// point.
//
// Rule for bytes that are not UTF-8: each maximal part of an ill-formed sequence becomes one U+FFFD
// (the practice the Unicode standard recommends in chapter 3; WHATWG's decoder and Python's
// errors="replace" do the same). So a code point cut short gives one, a stray byte gives one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/tokenizer/tokenizer.h"

namespace flashquant {

// The raw bytes that output token `id` adds to the answer: none for special tokens. FinishedEvent::
// text_bytes and the offsets of StopMatcher count these.
inline std::string_view AnswerBytes(const Tokenizer& tokenizer, int32_t id) {
  return tokenizer.IsSpecial(id) ? std::string_view() : tokenizer.TokenBytes(id);
}

// Bytes in any pieces to valid UTF-8: joined output does not depend on where the pieces were cut.
// One thread at a time.
class Utf8Repair final {
 public:
  // Appends what `bytes` completes to `out`; up to 3 bytes of an incomplete code point wait.
  void Append(std::string_view bytes, std::string* out);
  // The text is over: an incomplete code point becomes one U+FFFD.
  void Flush(std::string* out);

 private:
  bool Continues(uint8_t byte) const;

  std::string pending_;  // a proper prefix of one well-formed sequence
};

// Per request; one thread at a time.
class IncrementalDetokenizer final {
 public:
  // `tokenizer` must outlive it.
  explicit IncrementalDetokenizer(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  // Valid UTF-8, perhaps empty. Special tokens and ids without a token add nothing.
  std::string Append(int32_t id);
  // What was held back, at the end of the answer.
  std::string Flush();

 private:
  const Tokenizer* tokenizer_;
  Utf8Repair repair_;
};

}  // namespace flashquant
