// PrefixCache: which KV blocks hold the keys and values of which tokens, so that a prompt that
// begins like an earlier one need not compute that part again.
//
// Contents are a tree: what a block holds depends on its own tokens and on all before them, so a
// node is a full block behind the node of the block before it; the first blocks of a text hang on
// the cache's salt. A look-up compares hash, parent and the tokens themselves: two texts of the
// same hash are never taken for one another. Only whole blocks are shared, and only what the
// scheduler adds: blocks of committed steps whose rows were finite.
//
// All memory but that of long salts is taken by the constructor, so that no insert, eviction or
// look-up fails for want of it.
//
// Source: the idea is that of vLLM (hashed full blocks) and SGLang (a tree of prefixes).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "engine/scheduler/block_allocator.h"

namespace flashquant {

// How far a sequence's blocks are in the cache.
struct PrefixChain {
  int32_t num_blocks = 0;  // its first ones, all in the cache
  int32_t last_block = 0;  // the id of the last of these; void when there is none
  int64_t node = 0;        // what last_block was when it was added: ids are used again
  bool broken = false;     // what it stands on was forgotten: nothing is added any more
};

// Engine thread only. Sets the kept mark of the blocks that it knows in `allocator`, which tells it
// what was evicted. Every owner of a block must own those before it in the tree as well, and give
// them back later; then what is evicted is always a leaf.
class PrefixCache final {
 public:
  // `allocator` outlives it.
  PrefixCache(BlockAllocator* allocator, int32_t block_tokens);
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // The longest chain of at most `max_blocks` blocks that holds how `tokens` begin, and their ids.
  PrefixChain Find(std::string_view salt, std::span<const int32_t> tokens, int32_t max_blocks,
                   std::vector<int32_t>* ids) const;

  // Adds the used block `id`, which holds `tokens` [block_tokens], behind `chain`. Returns the
  // block that holds them in the cache from now on: `id`, or the one that did before, which the
  // caller should own instead. -1, and the chain is broken, when its last node was forgotten or
  // there is no memory for the salt.
  int32_t Extend(std::string_view salt, std::span<const int32_t> tokens, int32_t id,
                 PrefixChain* chain);

  // Takes out the node of the block `id`, which has one, and all behind it.
  void Forget(int32_t id) noexcept;
  void Clear() noexcept;

  int32_t num_nodes() const { return num_nodes_; }

 private:
  static constexpr int64_t kNoNode = 0;

  static constexpr int32_t kEnd = 0;  // the null block has no node

  struct Node {  // of one block id
    int64_t serial = kNoNode;
    int64_t parent = kNoNode;     // serial
    int32_t parent_block = kEnd;  // whose node that is or was
    int32_t next = kEnd;          // block id: the next node of this bucket
    std::string salt;             // of a node without parent
  };
  struct Key {
    int64_t parent = kNoNode;
    std::string_view salt;
    std::span<const int32_t> tokens;

    bool operator==(const Key& other) const;
    template <typename H>
    friend H AbslHashValue(H hash, const Key& key) {
      hash = H::combine_contiguous(std::move(hash), key.salt.data(), key.salt.size());
      hash = H::combine_contiguous(std::move(hash), key.tokens.data(), key.tokens.size());
      return H::combine(std::move(hash), key.parent, key.salt.size());
    }
  };

  Node& NodeOf(int32_t id) { return nodes_[static_cast<size_t>(id)]; }
  const Node& NodeOf(int32_t id) const { return nodes_[static_cast<size_t>(id)]; }
  std::span<const int32_t> TokensOf(int32_t id) const;
  Key KeyOf(int32_t id) const;
  const int32_t& BucketOf(const Key& key) const;
  int32_t& BucketOf(const Key& key);
  int32_t FindNode(const Key& key) const;  // kEnd: nobody has it
  void Remove(int32_t id) noexcept;
  std::span<const int32_t> IdsByAge() noexcept;  // of all nodes; until the next call

  BlockAllocator* const allocator_;
  const int32_t block_tokens_;
  std::vector<Node> nodes_;       // by block id
  std::vector<int32_t> tokens_;   // [num_blocks, block_tokens], of the nodes
  std::vector<int32_t> buckets_;  // first node of each; a power of two of them
  std::vector<int32_t> by_age_;   // room for IdsByAge
  int32_t num_nodes_ = 0;
  int64_t next_serial_ = 1;
};

}  // namespace flashquant
