#include "engine/tokenizer/byte_trie.h"

namespace flashquant {

void ByteTrie::Add(std::string_view content, int32_t index) {
  starts_[static_cast<uint8_t>(content.front())] = true;
  uint64_t node = 0;
  for (const char c : content) {
    const auto [it, is_new] = children_.emplace((node << 8) | static_cast<uint8_t>(c),
                                                static_cast<int32_t>(index_of_node_.size()));
    if (is_new) index_of_node_.push_back(-1);
    node = static_cast<uint64_t>(it->second);
  }
  index_of_node_[node] = index;
}

int32_t ByteTrie::Longest(std::string_view text, size_t pos, size_t* end) const {
  if (!starts_[static_cast<uint8_t>(text[pos])]) return -1;
  int32_t found = -1;
  uint64_t node = 0;
  for (size_t i = pos; i < text.size(); ++i) {
    const auto it = children_.find((node << 8) | static_cast<uint8_t>(text[i]));
    if (it == children_.end()) break;
    node = static_cast<uint64_t>(it->second);
    if (index_of_node_[node] >= 0) {
      found = index_of_node_[node];
      *end = i + 1;
    }
  }
  return found;
}

}  // namespace flashquant
