// Stop sequences by the rule spelled out on the whole text, for tests and fuzz targets of the
// matcher that sees it in pieces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/tokenizer/stop_matcher.h"

namespace flashquant {

// The earliest end, then the longest, then the first. Empty sequences match nothing.
inline std::optional<StopMatch> ReferenceStopMatch(const std::string& text,
                                                   const std::vector<std::string>& sequences) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::optional<StopMatch> best;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const std::string& s = sequences[i];
      if (s.empty() || s.size() > end || text.compare(end - s.size(), s.size(), s) != 0) continue;
      const StopMatch match{static_cast<int32_t>(i), static_cast<int64_t>(end - s.size()),
                            static_cast<int64_t>(end)};
      if (!best || match.begin < best->begin) best = match;
    }
    if (best) return best;
  }
  return std::nullopt;
}

// Bytes at the end of `text`, in which nothing matches, that may begin a sequence.
inline int64_t ReferenceHeldBack(const std::string& text,
                                 const std::vector<std::string>& sequences) {
  size_t held = 0;
  for (const std::string& s : sequences) {
    for (size_t n = 1; n < s.size() && n <= text.size(); ++n) {
      if (text.compare(text.size() - n, n, s, 0, n) == 0) held = std::max(held, n);
    }
  }
  return static_cast<int64_t>(held);
}

}  // namespace flashquant
