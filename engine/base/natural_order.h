// Names with numbers in the order in which people count: "layers.2" before "layers.10".
#pragma once

#include <cstddef>
#include <string_view>

namespace flashquant {

// A strict order of any texts: runs of digits compare by their value, other bytes one by one; texts
// that differ in leading zeros alone compare as texts.
inline bool NaturalLess(std::string_view a, std::string_view b) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  // The number at the front of `text` without leading zeros; takes it off.
  const auto take_number = [&](std::string_view* text) {
    size_t begin = 0;
    while (begin < text->size() && (*text)[begin] == '0') ++begin;
    size_t end = begin;
    while (end < text->size() && is_digit((*text)[end])) ++end;
    const std::string_view number = text->substr(begin, end - begin);
    text->remove_prefix(end);
    return number;
  };
  std::string_view left = a;
  std::string_view right = b;
  while (!left.empty() && !right.empty()) {
    if (is_digit(left.front()) && is_digit(right.front())) {
      const std::string_view x = take_number(&left);
      const std::string_view y = take_number(&right);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else {
      if (left.front() != right.front()) return left.front() < right.front();
      left.remove_prefix(1);
      right.remove_prefix(1);
    }
  }
  if (left.empty() && right.empty()) return a < b;
  return left.empty();
}

}  // namespace flashquant
