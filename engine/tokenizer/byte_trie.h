// ByteTrie: a set of texts, and which of them is the longest that starts at a place of another
// text.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace flashquant {

// Any bytes. Not changed once it is searched; any thread then.
class ByteTrie final {
 public:
  // `content` is not empty; of two equal ones the last counts. index >= 0.
  void Add(std::string_view content, int32_t index);
  // Index of the longest text that starts at `pos` < text.size(), with *end after it; -1 when there
  // is none. At most as many steps as that text has bytes.
  int32_t Longest(std::string_view text, size_t pos, size_t* end) const;

 private:
  std::array<bool, 256> starts_{};                   // spares most places the search in the table
  absl::flat_hash_map<uint64_t, int32_t> children_;  // node << 8 | byte; the root is 0
  std::vector<int32_t> index_of_node_{-1};
};

}  // namespace flashquant
