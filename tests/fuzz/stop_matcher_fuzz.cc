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
#include "tests/support/reference_stop_match.h"

using flashquant::ReferenceHeldBack;
using flashquant::ReferenceStopMatch;
using flashquant::StopMatch;

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
    if (!match && matcher.held_back() != ReferenceHeldBack(text, sequences)) std::abort();
  }
  if (match != ReferenceStopMatch(text, sequences)) std::abort();
  return 0;
}
