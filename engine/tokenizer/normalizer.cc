#include "engine/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <cstdlib>
#include <memory>

#include "engine/tokenizer/unicode.h"

namespace flashquant {
namespace {

// utf8proc orders marks with a quadratic sort; a segment bounds it.
constexpr size_t kMaxSegmentChars = 256;

bool IsAscii(char c) { return static_cast<uint8_t>(c) < 0x80; }

// Whether `c` never joins what stands before it: marks and the later parts of Hangul syllables do.
bool StartsSegment(uint32_t c) {
  if (c < 0x300) return true;
  if (c >= 0x1160 && c <= 0x11FF) return false;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
      return false;
    default:
      return true;
  }
}

void AppendComposed(std::string_view segment, std::string* out) {
  utf8proc_uint8_t* composed = nullptr;
  const utf8proc_ssize_t num_bytes =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(segment.data()),
                   static_cast<utf8proc_ssize_t>(segment.size()), &composed,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(composed, &std::free);
  if (num_bytes < 0) {
    out->append(segment);
  } else {
    out->append(reinterpret_cast<const char*>(composed), static_cast<size_t>(num_bytes));
  }
}

}  // namespace

std::string ComposeNfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    // Two plain characters in a row: the first has nothing to compose with.
    if (IsAscii(text[pos]) && (pos + 1 == text.size() || IsAscii(text[pos + 1]))) {
      out.push_back(text[pos++]);
      continue;
    }
    size_t end = pos;
    for (size_t num_chars = 0; end < text.size() && num_chars < kMaxSegmentChars; ++num_chars) {
      const DecodedChar c = DecodeUtf8(text, end);
      if (!c.valid || (end > pos && StartsSegment(c.code_point))) break;
      end += c.num_bytes;
    }
    if (end == pos) {  // a byte that is not UTF-8
      out.push_back(text[pos++]);
    } else {
      AppendComposed(text.substr(pos, end - pos), &out);
      pos = end;
    }
  }
  return out;
}

std::string ReplaceAll(std::string_view text, std::string_view pattern, std::string_view content) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0;;) {
    const size_t found = text.find(pattern, pos);
    out.append(text.substr(pos, found - pos));
    if (found == std::string_view::npos) return out;
    out.append(content);
    pos = found + pattern.size();
  }
}

namespace {

std::string TrimSpaces(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    if (c != ' ' || (!out.empty() && out.back() != ' ')) out.push_back(c);
  }
  for (;;) {
    if (out.ends_with(' ')) {
      out.pop_back();
    } else if (out.ends_with(kVisibleSpace)) {
      out.resize(out.size() - kVisibleSpace.size());
    } else {
      return out;
    }
  }
}

}  // namespace

std::string Normalizer::Apply(std::string_view text) const {
  std::string result(text);
  for (const NormalizerStage& stage : stages_) {
    switch (stage.kind) {
      case NormalizerStage::Kind::kNfc:
        result = ComposeNfc(result);
        break;
      case NormalizerStage::Kind::kPrepend:
        if (!result.empty()) result.insert(0, stage.content);
        break;
      case NormalizerStage::Kind::kReplace:
        result = ReplaceAll(result, stage.pattern, stage.content);
        break;
      case NormalizerStage::Kind::kTrimSpaces:
        result = TrimSpaces(result);
        break;
    }
  }
  return result;
}

}  // namespace flashquant
