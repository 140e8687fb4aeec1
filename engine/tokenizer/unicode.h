// Unicode for the tokenizer: strict UTF-8 decoding and the few character classes that
// pre-tokenizers ask for. No normalisation, no case mapping, no grapheme rules.
//
// The classes come from PCRE2's tables (Unicode 14 in Debian 12; characters assigned later have no
// class), read once into a flat table: no regular expression ever runs on request text, so no text
// can make the splitter slow or recurse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace flashquant {

inline constexpr uint32_t kMaxCodePoint = 0x10FFFF;

struct DecodedChar {
  uint32_t code_point = 0;  // the byte itself when not valid
  uint32_t num_bytes = 1;   // 1..4; 1 when not valid
  bool valid = false;       // shortest form, no surrogate, at most kMaxCodePoint
};

// The character that starts at `pos` < text.size().
DecodedChar DecodeUtf8(std::string_view text, size_t pos);

// Appends the 1..4 bytes of `code_point` <= kMaxCodePoint (surrogates are not refused).
void AppendUtf8(uint32_t code_point, std::string* out);

// Character classes of every code point. Immutable; any thread.
class UnicodeClasses final {
 public:
  enum : uint8_t {
    kLetter = 1,  // \p{L}
    kNumber = 2,  // \p{N}
    kSpace = 4,   // White_Space
    kWord = 8,    // letters, marks, decimal and letter numbers, connectors, joiners
  };

  // The one table of the process, built at the first call (about 20 ms). INTERNAL when PCRE2 was
  // built without Unicode.
  static absl::StatusOr<const UnicodeClasses*> Get();

  // Class bits; 0 for bytes that are not UTF-8, which so count as punctuation.
  uint8_t Of(const DecodedChar& c) const { return c.valid ? bits_[c.code_point] : uint8_t{0}; }

 private:
  UnicodeClasses() = default;
  static absl::StatusOr<const UnicodeClasses*> Build();

  std::vector<uint8_t> bits_;
};

}  // namespace flashquant
