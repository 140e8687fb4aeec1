// Table 3-7 of the Unicode standard ("Well-Formed UTF-8 Byte Sequences") as a check per byte, so
// that an ill-formed sequence is known at its first wrong byte.
#include "engine/tokenizer/incremental_detokenizer.h"

namespace flashquant {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

size_t SequenceBytes(uint8_t lead) { return lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2; }

bool IsLead(uint8_t byte) { return byte >= 0xC2 && byte <= 0xF4; }

}  // namespace

bool Utf8Repair::Continues(uint8_t byte) const {
  uint8_t low = 0x80;
  uint8_t high = 0xBF;
  if (pending_.size() == 1) {
    switch (static_cast<uint8_t>(pending_[0])) {
      case 0xE0:  // shorter forms exist
        low = 0xA0;
        break;
      case 0xED:  // surrogates
        high = 0x9F;
        break;
      case 0xF0:
        low = 0x90;
        break;
      case 0xF4:  // above U+10FFFF
        high = 0x8F;
        break;
      default:
        break;
    }
  }
  return byte >= low && byte <= high;
}

void Utf8Repair::Append(std::string_view bytes, std::string* out) {
  for (const char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    if (!pending_.empty()) {
      if (Continues(byte)) {
        pending_.push_back(c);
        if (pending_.size() == SequenceBytes(static_cast<uint8_t>(pending_[0]))) {
          out->append(pending_);
          pending_.clear();
        }
        continue;
      }
      Flush(out);
    }
    if (byte < 0x80) {
      out->push_back(c);
    } else if (IsLead(byte)) {
      pending_.push_back(c);
    } else {
      out->append(kReplacement);
    }
  }
}

void Utf8Repair::Flush(std::string* out) {
  if (pending_.empty()) return;
  out->append(kReplacement);
  pending_.clear();
}

std::string IncrementalDetokenizer::Append(int32_t id) {
  std::string text;
  repair_.Append(AnswerBytes(*tokenizer_, id), &text);
  return text;
}

std::string IncrementalDetokenizer::Flush() {
  std::string text;
  repair_.Flush(&text);
  return text;
}

}  // namespace flashquant
