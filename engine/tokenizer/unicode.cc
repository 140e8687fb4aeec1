// UTF-8 decoding after the table of well-formed byte sequences in the Unicode standard (chapter 3,
// "Unicode Encoding Forms"); classes by one PCRE2 search over a text of all code points.
#include "engine/tokenizer/unicode.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <memory>

#include "kernels/base/status_macros.h"
#include "pcre2.h"

namespace flashquant {
namespace {

bool IsContinuation(uint8_t byte) { return (byte & 0xC0) == 0x80; }

// Sets `bit` for every code point in `all` (each once, in UTF-8) that `pattern` matches.
absl::Status MarkClass(const std::string& all, const char* pattern, uint8_t bit,
                       std::vector<uint8_t>* bits) {
  int error = 0;
  PCRE2_SIZE error_offset = 0;
  const std::unique_ptr<pcre2_code, decltype(&pcre2_code_free)> code(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern), PCRE2_ZERO_TERMINATED,
                    PCRE2_UTF | PCRE2_UCP, &error, &error_offset, nullptr),
      &pcre2_code_free);
  if (code == nullptr) return InternalError("tokenizer: PCRE2 refuses '{}' ({})", pattern, error);
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // without JIT it is only slower
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
      pcre2_match_data_create(1, nullptr), &pcre2_match_data_free);
  size_t pos = 0;
  while (pos < all.size()) {
    const int num_groups = pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(all.data()),
                                       all.size(), pos, PCRE2_NO_UTF_CHECK, match.get(), nullptr);
    if (num_groups == PCRE2_ERROR_NOMATCH) break;
    if (num_groups < 0) return InternalError("tokenizer: PCRE2 match error {}", num_groups);
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match.get());
    pos = range[1];
    for (size_t i = range[0]; i < range[1];) {
      const DecodedChar c = DecodeUtf8(all, i);
      (*bits)[c.code_point] = static_cast<uint8_t>((*bits)[c.code_point] | bit);
      i += c.num_bytes;
    }
  }
  return absl::OkStatus();
}

}  // namespace

DecodedChar DecodeUtf8(std::string_view text, size_t pos) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(pos);
  if (lead < 0x80) return {lead, 1, true};
  const DecodedChar bad{lead, 1, false};
  const uint32_t num_bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() - pos < num_bytes) return bad;
  uint32_t code_point = lead & (0x7Fu >> num_bytes);
  for (uint32_t i = 1; i < num_bytes; ++i) {
    if (!IsContinuation(byte(pos + i))) return bad;
    code_point = (code_point << 6) | (byte(pos + i) & 0x3Fu);
  }
  const bool overlong =
      (num_bytes == 3 && code_point < 0x800) || (num_bytes == 4 && code_point < 0x10000);
  const bool surrogate = code_point >= 0xD800 && code_point <= 0xDFFF;
  if (overlong || surrogate || code_point > kMaxCodePoint) return bad;
  return {code_point, num_bytes, true};
}

void AppendUtf8(uint32_t code_point, std::string* out) {
  const auto push = [&](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    push(code_point);
    return;
  }
  if (code_point < 0x800) {
    push(0xC0 | (code_point >> 6));
  } else {
    if (code_point < 0x10000) {
      push(0xE0 | (code_point >> 12));
    } else {
      push(0xF0 | (code_point >> 18));
      push(0x80 | ((code_point >> 12) & 0x3F));
    }
    push(0x80 | ((code_point >> 6) & 0x3F));
  }
  push(0x80 | (code_point & 0x3F));
}

absl::StatusOr<const UnicodeClasses*> UnicodeClasses::Get() {
  static const absl::StatusOr<const UnicodeClasses*> classes = Build();
  return classes;
}

absl::StatusOr<const UnicodeClasses*> UnicodeClasses::Build() {
  std::string all;
  for (uint32_t c = 0; c <= kMaxCodePoint; ++c) {
    if (c < 0xD800 || c > 0xDFFF) AppendUtf8(c, &all);
  }
  std::unique_ptr<UnicodeClasses> classes(new UnicodeClasses());
  classes->bits_.assign(kMaxCodePoint + 1, 0);
  FQ_RETURN_IF_ERROR(MarkClass(all, "\\p{L}+", kLetter, &classes->bits_));
  FQ_RETURN_IF_ERROR(MarkClass(all, "\\p{N}+", kNumber, &classes->bits_));
  // White_Space spelled out: PCRE2's own \s also has U+180E, which left that property in
  // Unicode 6.3.
  FQ_RETURN_IF_ERROR(MarkClass(all, "[\\x{9}-\\x{d}\\x{85}\\p{Z}]+", kSpace, &classes->bits_));
  // \w of Unicode TR 18: Alphabetic (letters, marks, letter numbers, enclosed letters), decimal
  // numbers, connector punctuation, the two joiners.
  FQ_RETURN_IF_ERROR(
      MarkClass(all,
                "[\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{200c}\\x{200d}\\x{24b6}-\\x{24e9}"
                "\\x{1f130}-\\x{1f149}\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{1f189}]+",
                kWord, &classes->bits_));
  return classes.release();  // lives as long as the process
}

}  // namespace flashquant
