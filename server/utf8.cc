// One pass over the bytes; the second byte's range depends on the first (table 3-7).
#include "server/utf8.h"

#include <cstdint>

namespace flashquant {
namespace {

// Bytes of the well-formed code point at the start of `text`, 0 when there is none.
size_t CodePointBytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  size_t num_bytes = 0;
  uint8_t low = 0x80;
  uint8_t high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    num_bytes = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    num_bytes = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    num_bytes = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return 0;
  }
  if (text.size() < num_bytes || byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < num_bytes; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xBF) return 0;
  }
  return num_bytes;
}

}  // namespace

std::optional<size_t> FindInvalidUtf8(std::string_view text) {
  size_t offset = 0;
  while (offset < text.size()) {
    const size_t num_bytes = CodePointBytes(text.substr(offset));
    if (num_bytes == 0) return offset;
    offset += num_bytes;
  }
  return std::nullopt;
}

}  // namespace flashquant
