// BlockAllocator: ids of the KV blocks: a free list, reference counts, and blocks without owners
// that are kept for what is in them until their room is needed. Ids only: the memory behind them is
// KvCache's, what is in them PrefixCache's, which sequence owns one BlockTable's business.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace flashquant {

// Hands out the ids 1 .. num_blocks - 1; block 0 (kNullBlock) is never handed out. Each of the
// others is used (has owners), idle (has none, is kept) or free. Engine thread only. Returning an
// id that is not handed out is a programmer error.
class BlockAllocator final {
 public:
  // num_blocks >= 1, the null block included.
  explicit BlockAllocator(int32_t num_blocks);
  BlockAllocator(const BlockAllocator&) = delete;
  BlockAllocator& operator=(const BlockAllocator&) = delete;

  // Called with each idle block that Allocate takes, which is then no longer kept.
  void SetOnEvict(std::function<void(int32_t)> on_evict) { on_evict_ = std::move(on_evict); }

  // Appends `count` (>= 0) ids with one reference each to `ids`, or changes nothing and returns
  // false when fewer are available. Free ones go first, then idle ones, the longest idle first.
  bool Allocate(int32_t count, std::vector<int32_t>* ids);
  // One more owner of a used block, or the first one of an idle block.
  void AddReference(int32_t id);
  // One owner less; without owners the block is idle when it is kept, else free.
  void Release(int32_t id);
  // Whether a used block becomes idle instead of free. An idle block that is not kept is free.
  void SetKept(int32_t id, bool kept);

  // The only capacity number: all blocks but the null block.
  int32_t usable_blocks() const { return static_cast<int32_t>(blocks_.size()) - 1; }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_idle() const { return static_cast<int32_t>(idle_.size()); }
  // What Allocate can give.
  int32_t num_available() const { return num_free() + num_idle(); }
  int32_t num_used() const { return num_used_; }
  int32_t references(int32_t id) const { return blocks_[static_cast<size_t>(id)].references; }
  // Of all blocks together.
  int64_t num_references() const { return num_references_; }
  // Calls of Allocate that were refused.
  int64_t num_failures() const { return num_failures_; }

 private:
  struct Block {
    int32_t references = 0;
    bool kept = false;
    int64_t idle_since = 0;  // key in idle_
  };

  Block& HandedOut(int32_t id);
  int32_t TakeOne();

  std::vector<Block> blocks_;        // [num_blocks]
  std::vector<int32_t> free_;        // last one goes first
  std::map<int64_t, int32_t> idle_;  // by the order of becoming idle
  int64_t next_idle_ = 0;
  int32_t num_used_ =
      0;  // counted by itself, so that the three states can be held against the pool
  int64_t num_references_ = 0;
  int64_t num_failures_ = 0;
  std::function<void(int32_t)> on_evict_;
};

}  // namespace flashquant
