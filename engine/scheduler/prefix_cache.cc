#include "engine/scheduler/prefix_cache.h"

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

#include "kernels/base/check.h"

namespace flashquant {

bool PrefixCache::Key::operator==(const Key& other) const {
  return parent == other.parent && salt == other.salt && std::ranges::equal(tokens, other.tokens);
}

PrefixCache::PrefixCache(BlockAllocator* allocator, int32_t block_tokens)
    : allocator_(allocator),
      block_tokens_(block_tokens),
      nodes_(static_cast<size_t>(allocator->usable_blocks()) + 1),
      tokens_(nodes_.size() * static_cast<size_t>(block_tokens)),
      buckets_(std::bit_ceil(nodes_.size()), kEnd) {
  by_age_.reserve(nodes_.size());
  allocator_->SetOnEvict([this](int32_t id) { Remove(id); });
}

std::span<const int32_t> PrefixCache::TokensOf(int32_t id) const {
  const auto count = static_cast<size_t>(block_tokens_);
  return std::span<const int32_t>(tokens_).subspan(static_cast<size_t>(id) * count, count);
}

PrefixCache::Key PrefixCache::KeyOf(int32_t id) const {
  return {NodeOf(id).parent, NodeOf(id).salt, TokensOf(id)};
}

const int32_t& PrefixCache::BucketOf(const Key& key) const {
  return buckets_[absl::Hash<Key>{}(key) & (buckets_.size() - 1)];
}

int32_t& PrefixCache::BucketOf(const Key& key) {
  return buckets_[absl::Hash<Key>{}(key) & (buckets_.size() - 1)];
}

int32_t PrefixCache::FindNode(const Key& key) const {
  int32_t id = BucketOf(key);
  while (id != kEnd && !(KeyOf(id) == key)) id = NodeOf(id).next;
  return id;
}

PrefixChain PrefixCache::Find(std::string_view salt, std::span<const int32_t> tokens,
                              int32_t max_blocks, std::vector<int32_t>* ids) const {
  const auto block_tokens = static_cast<size_t>(block_tokens_);
  PrefixChain chain;
  for (; chain.num_blocks < max_blocks && tokens.size() >= block_tokens; ++chain.num_blocks) {
    const int32_t found =
        FindNode({chain.node, chain.num_blocks == 0 ? salt : "", tokens.first(block_tokens)});
    if (found == kEnd) break;
    chain.last_block = found;
    chain.node = NodeOf(found).serial;
    ids->push_back(found);
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
  const bool first = chain->num_blocks == 0;
  const Key key = {chain->node, first ? salt : "", tokens};
  const int32_t found = FindNode(key);
  if (found != kEnd) {
    id = found;
  } else {
    Node& node = NodeOf(id);
    FQ_CHECK(node.serial == kNoNode);
    try {
      node.salt = key.salt;
    } catch (const std::bad_alloc&) {
      chain->broken = true;
      return -1;
    }
    node.serial = next_serial_++;
    node.parent = chain->node;
    node.parent_block = first ? kEnd : chain->last_block;
    std::ranges::copy(tokens, tokens_.begin() + int64_t{id} * block_tokens_);
    node.next = std::exchange(BucketOf(key), id);
    ++num_nodes_;
    allocator_->SetKept(id, true);
  }
  ++chain->num_blocks;
  chain->last_block = id;
  chain->node = NodeOf(id).serial;
  return id;
}

void PrefixCache::Remove(int32_t id) noexcept {
  int32_t* link = &BucketOf(KeyOf(id));
  while (*link != id) link = &NodeOf(*link).next;
  *link = NodeOf(id).next;
  NodeOf(id) = Node{};
  --num_nodes_;
}

// Nodes are numbered as they come, so parents have lower numbers than what hangs on them: one pass
// in that order finds the whole tree.
void PrefixCache::Forget(int32_t id) noexcept {
  FQ_CHECK(NodeOf(id).serial != kNoNode);
  for (const int32_t other : IdsByAge()) {
    const Node& node = NodeOf(other);
    const bool hangs_on_it =
        node.parent != kNoNode && NodeOf(node.parent_block).serial != node.parent;
    if (other != id && !hangs_on_it) continue;
    Remove(other);
    allocator_->SetKept(other, false);
  }
}

void PrefixCache::Clear() noexcept {
  for (const int32_t id : IdsByAge()) {
    Remove(id);
    allocator_->SetKept(id, false);
  }
}

std::span<const int32_t> PrefixCache::IdsByAge() noexcept {
  by_age_.clear();
  for (size_t id = 0; id < nodes_.size(); ++id) {
    if (nodes_[id].serial != kNoNode) by_age_.push_back(static_cast<int32_t>(id));
  }
  std::ranges::sort(by_age_, {}, [this](int32_t id) { return NodeOf(id).serial; });
  return by_age_;
}

}  // namespace flashquant
