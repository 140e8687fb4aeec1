#include "engine/scheduler/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"

namespace flashquant {

bool PrefixCache::Key::operator==(const Key& other) const {
  return parent == other.parent && salt == other.salt && std::ranges::equal(tokens, other.tokens);
}

PrefixCache::Key PrefixCache::KeyOf::operator()(int32_t id) const {
  const Node& node = (*nodes)[static_cast<size_t>(id)];
  return {node.parent, node.salt, node.tokens};
}

PrefixCache::PrefixCache(BlockAllocator* allocator, int32_t block_tokens)
    : allocator_(allocator),
      block_tokens_(block_tokens),
      nodes_(static_cast<size_t>(allocator->usable_blocks()) + 1),
      index_(0, HashOf{{&nodes_}}, Equal{{&nodes_}}) {
  index_.reserve(nodes_.size());
  allocator_->SetOnEvict([this](int32_t id) { Remove(id); });
}

PrefixChain PrefixCache::Find(std::string_view salt, std::span<const int32_t> tokens,
                              int32_t max_blocks, std::vector<int32_t>* ids) const {
  const auto block_tokens = static_cast<size_t>(block_tokens_);
  PrefixChain chain;
  for (; chain.num_blocks < max_blocks && tokens.size() >= block_tokens; ++chain.num_blocks) {
    const auto found =
        index_.find(Key{chain.node, chain.num_blocks == 0 ? salt : "", tokens.first(block_tokens)});
    if (found == index_.end()) break;
    chain.last_block = *found;
    chain.node = nodes_[static_cast<size_t>(*found)].serial;
    ids->push_back(*found);
    tokens = tokens.subspan(block_tokens);
  }
  return chain;
}

int32_t PrefixCache::Extend(std::string_view salt, std::span<const int32_t> tokens, int32_t id,
                            PrefixChain* chain) {
  FQ_CHECK(static_cast<int32_t>(tokens.size()) == block_tokens_);
  if (chain->num_blocks > 0 && NodeOf(chain->last_block).serial != chain->node) {
    chain->broken = true;
  }
  if (chain->broken) return -1;
  if (chain->num_blocks > 0) salt = "";
  const auto found = index_.find(Key{chain->node, salt, tokens});
  if (found != index_.end()) {
    id = *found;
  } else {
    Node& node = NodeOf(id);
    FQ_CHECK(node.serial == kNoNode);
    node = {next_serial_++, chain->node, std::string(salt), {tokens.begin(), tokens.end()}};
    index_.insert(id);
    allocator_->SetKept(id, true);
  }
  ++chain->num_blocks;
  chain->last_block = id;
  chain->node = NodeOf(id).serial;
  return id;
}

void PrefixCache::Remove(int32_t id) {
  index_.erase(id);
  NodeOf(id) = Node{};
}

// Nodes are numbered as they come, so parents have lower numbers than what hangs on them: one pass
// in that order finds the whole tree.
void PrefixCache::Forget(int32_t id) {
  FQ_CHECK(NodeOf(id).serial != kNoNode);
  absl::flat_hash_set<int64_t> forgotten = {NodeOf(id).serial};
  for (int32_t other : IdsByAge()) {
    const Node& node = NodeOf(other);
    if (forgotten.contains(node.parent)) forgotten.insert(node.serial);
    if (!forgotten.contains(node.serial)) continue;
    Remove(other);
    allocator_->SetKept(other, false);
  }
}

void PrefixCache::Clear() {
  for (int32_t id : IdsByAge()) {
    Remove(id);
    allocator_->SetKept(id, false);
  }
}

std::vector<int32_t> PrefixCache::IdsByAge() const {
  std::vector<int32_t> ids(index_.begin(), index_.end());
  std::ranges::sort(ids, {}, [this](int32_t id) { return nodes_[static_cast<size_t>(id)].serial; });
  return ids;
}

}  // namespace flashquant
