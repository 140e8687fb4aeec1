// F5: stop sequences and an answer in chunks. Input: number of sequences (low 3 bits + 1), then
// that many of a length byte (1..16) and bytes, then the answer; a byte of it also says how long
// the next chunk is. Equal to a naive search on the joined answer.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "engine/tokenizer/stop_matcher.h"

namespace {

using flashquant::StopMatch;

std::optional<StopMatch> NaiveMatch(const std::string& text,
                                    const std::vector<std::string>& sequences) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::optional<StopMatch> best;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const size_t length = sequences[i].size();
      if (length == 0 || length > end) continue;
      if (text.compare(end - length, length, sequences[i]) != 0) continue;
      const auto begin = static_cast<int64_t>(end - length);
      if (!best || begin < best->begin) {
        best = StopMatch{static_cast<int32_t>(i), begin, static_cast<int64_t>(end)};
      }
    }
    if (best) return best;
  }
  return std::nullopt;
}

int64_t NaiveHeldBack(const std::string& text, const std::vector<std::string>& sequences) {
  size_t held = 0;
  for (const std::string& s : sequences) {
    for (size_t n = 1; n < s.size() && n <= text.size(); ++n) {
      if (text.compare(text.size() - n, n, s, 0, n) == 0) held = std::max(held, n);
    }
  }
  return static_cast<int64_t>(held);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  size_t pos = 0;
  const auto take = [&](size_t wanted) {
    const size_t count = std::min(wanted, num_bytes - pos);
    std::string bytes(reinterpret_cast<const char*>(data) + pos, count);
    pos += count;
    return bytes;
  };
  if (num_bytes == 0) return 0;
  std::vector<std::string> sequences;
  const size_t num_sequences = (data[pos++] & 7u) + 1;
  for (size_t i = 0; i < num_sequences && pos < num_bytes; ++i) {
    const size_t length = data[pos++] % 17;
    sequences.push_back(take(length));
  }
  flashquant::StopMatcher matcher(sequences);
  std::string text;
  std::optional<StopMatch> match;
  while (pos < num_bytes && !match) {
    const std::string chunk = take(1u + data[pos] % 5);
    text += chunk;
    match = matcher.Feed(chunk);
    if (!match && matcher.held_back() != NaiveHeldBack(text, sequences)) std::abort();
  }
  if (match != NaiveMatch(text, sequences)) std::abort();
  return 0;
}
