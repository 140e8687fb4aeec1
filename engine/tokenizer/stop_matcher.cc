// Edges are sibling lists, not tables: there are at most as many edges from a node as sequences.
#include "engine/tokenizer/stop_matcher.h"

namespace flashquant {

StopMatcher::StopMatcher(std::span<const std::string> sequences) {
  nodes_.emplace_back();
  for (size_t i = 0; i < sequences.size(); ++i) {
    sequence_bytes_.push_back(static_cast<int64_t>(sequences[i].size()));
    int32_t node = 0;
    for (const char c : sequences[i]) {
      const auto byte = static_cast<uint8_t>(c);
      int32_t child = Child(node, byte);
      if (child < 0) {
        child = static_cast<int32_t>(nodes_.size());
        Node added;
        added.next_sibling = nodes_[static_cast<size_t>(node)].first_child;
        added.depth = nodes_[static_cast<size_t>(node)].depth + 1;
        added.byte = byte;
        nodes_.push_back(added);
        nodes_[static_cast<size_t>(node)].first_child = child;
      }
      node = child;
    }
    Node& last = nodes_[static_cast<size_t>(node)];
    if (node != 0 && last.match < 0) last.match = static_cast<int32_t>(i);
  }
  LinkSuffixes();
}

int32_t StopMatcher::Child(int32_t node, uint8_t byte) const {
  int32_t child = nodes_[static_cast<size_t>(node)].first_child;
  while (child >= 0 && nodes_[static_cast<size_t>(child)].byte != byte) {
    child = nodes_[static_cast<size_t>(child)].next_sibling;
  }
  return child;
}

int32_t StopMatcher::Step(int32_t node, uint8_t byte) const {
  for (;;) {
    if (const int32_t child = Child(node, byte); child >= 0) return child;
    if (node == 0) return 0;
    node = nodes_[static_cast<size_t>(node)].fail;
  }
}

// Breadth first: a suffix is shorter than its node, so it is complete when it is needed.
void StopMatcher::LinkSuffixes() {
  std::vector<int32_t> queue{0};
  for (size_t i = 0; i < queue.size(); ++i) {
    const int32_t parent = queue[i];
    int32_t child = nodes_[static_cast<size_t>(parent)].first_child;
    for (; child >= 0; child = nodes_[static_cast<size_t>(child)].next_sibling) {
      Node& node = nodes_[static_cast<size_t>(child)];
      node.fail = parent == 0 ? 0 : Step(nodes_[static_cast<size_t>(parent)].fail, node.byte);
      if (node.match < 0) node.match = nodes_[static_cast<size_t>(node.fail)].match;
      queue.push_back(child);
    }
  }
}

std::optional<StopMatch> StopMatcher::Feed(std::string_view bytes, bool counts) {
  std::optional<StopMatch> found;
  for (size_t i = 0; i < bytes.size() && !matched_; ++i) {
    state_ = Step(state_, static_cast<uint8_t>(bytes[i]));
    const int32_t match = nodes_[static_cast<size_t>(state_)].match;
    if (match < 0 || !counts) continue;
    matched_ = true;
    const int64_t end = num_bytes_ + static_cast<int64_t>(i) + 1;
    found = StopMatch{match, end - sequence_bytes_[static_cast<size_t>(match)], end};
  }
  num_bytes_ += static_cast<int64_t>(bytes.size());
  return found;
}

int64_t StopMatcher::held_back() const {
  if (matched_) return 0;
  int32_t node = state_;
  // A leaf is a whole sequence that did not count; only what may grow is held.
  while (node != 0 && nodes_[static_cast<size_t>(node)].first_child < 0) {
    node = nodes_[static_cast<size_t>(node)].fail;
  }
  return nodes_[static_cast<size_t>(node)].depth;
}

}  // namespace flashquant
