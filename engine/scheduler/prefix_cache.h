// PrefixCache: which KV blocks hold the keys and values of which tokens, so that a prompt that
// begins like an earlier one need not compute that part again.
//
// Contents are a tree: what a block holds depends on its own tokens and on all before them, so a
// node is a full block behind the node of the block before it; the first blocks of a text hang on
// the cache's salt. A look-up compares hash, parent and the tokens themselves: two texts of the
// same hash are never taken for one another. Only whole blocks are shared, and only what the
// scheduler adds: blocks of committed steps whose rows were finite.
//
// Source: the idea is that of vLLM (hashed full blocks) and SGLang (a tree of prefixes).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
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
  // caller should own instead. -1, and the chain is broken, when its last node was forgotten.
  int32_t Extend(std::string_view salt, std::span<const int32_t> tokens, int32_t id,
                 PrefixChain* chain);

  // Takes out the node of the block `id`, which has one, and all behind it.
  void Forget(int32_t id);
  void Clear();

  int32_t num_nodes() const { return static_cast<int32_t>(index_.size()); }

 private:
  static constexpr int64_t kNoNode = 0;

  struct Node {  // of one block id
    int64_t serial = kNoNode;
    int64_t parent = kNoNode;  // serial
    std::string salt;          // of a node without parent
    std::vector<int32_t> tokens;
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
  // The index holds block ids and compares what their nodes stand for.
  struct KeyOf {
    using is_transparent = void;
    const std::vector<Node>* nodes;
    Key operator()(int32_t id) const;
    const Key& operator()(const Key& key) const { return key; }
  };
  struct HashOf {
    using is_transparent = void;
    KeyOf key_of;
    template <typename T>
    size_t operator()(const T& value) const {
      return absl::Hash<Key>{}(key_of(value));
    }
  };
  struct Equal {
    using is_transparent = void;
    KeyOf key_of;
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      return key_of(a) == key_of(b);
    }
  };

  Node& NodeOf(int32_t id) { return nodes_[static_cast<size_t>(id)]; }
  void Remove(int32_t id);
  std::vector<int32_t> IdsByAge() const;  // of all nodes

  BlockAllocator* const allocator_;
  const int32_t block_tokens_;
  std::vector<Node> nodes_;  // by block id
  absl::flat_hash_set<int32_t, HashOf, Equal> index_;
  int64_t next_serial_ = 1;
};

}  // namespace flashquant
