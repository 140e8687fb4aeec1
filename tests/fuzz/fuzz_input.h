// FuzzInput: the bytes of one input taken apart into numbers and texts, for harnesses whose input
// is a script; after its end every number is 0 and every text empty. Require: a property.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

namespace flashquant {

inline void Require(bool condition, std::string_view what) {
  if (condition) return;
  std::fprintf(stderr, "property broken: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

// What is before the first `separator` in `text`, which is taken off with it.
inline std::string_view TakeUntil(char separator, std::string_view* text) {
  const std::string_view part = text->substr(0, text->find(separator));
  text->remove_prefix(std::min(part.size() + 1, text->size()));
  return part;
}

class FuzzInput final {
 public:
  FuzzInput(const uint8_t* data, size_t size) : bytes_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return bytes_.empty(); }
  uint8_t Byte() {
    if (bytes_.empty()) return 0;
    const auto byte = static_cast<uint8_t>(bytes_.front());
    bytes_.remove_prefix(1);
    return byte;
  }
  // From low to high, for ranges of at most 65536 numbers.
  int32_t Number(int32_t low, int32_t high) {
    const int32_t range = high - low + 1;
    int32_t value = Byte();
    if (range > 256) value = value << 8 | Byte();
    return low + value % range;
  }
  bool Chance(int32_t one_in) { return Number(0, one_in - 1) == 0; }
  // Any four bytes: NaN and denormal numbers among them.
  uint32_t Word() {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word = word << 8 | Byte();
    return word;
  }
  std::string_view Bytes(size_t count) {
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(taken.size());
    return taken;
  }
  // A length byte (0 .. max) and so many bytes.
  std::string Text(int32_t max_length) {
    return std::string(Bytes(static_cast<size_t>(Number(0, max_length))));
  }
  std::string_view Rest() { return Bytes(bytes_.size()); }

 private:
  std::string_view bytes_;
};

}  // namespace flashquant
