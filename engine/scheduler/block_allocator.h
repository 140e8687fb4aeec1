// BlockAllocator: ids of the KV blocks: a free list, reference counts, and blocks without owners
// that are kept for what is in them until their room is needed. Ids only: the memory behind them is
// KvCache's, what is in them PrefixCache's, which sequence owns one BlockTable's business.
//
// All memory is taken by the constructor: a block can always be given back, also in a destructor
// that runs because memory is short.
#pragma once

#include <cstdint>
#include <functional>
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

  // Called with each idle block that Allocate takes, which is then no longer kept. Must not throw.
  void SetOnEvict(std::function<void(int32_t)> on_evict) { on_evict_ = std::move(on_evict); }

  // Appends `count` (>= 0) ids with one reference each to `ids`, or changes nothing and returns
  // false when fewer are available. Free ones go first, then idle ones, the longest idle first.
  // Changes nothing either when the memory for `ids` to grow cannot be had (std::bad_alloc).
  bool Allocate(int32_t count, std::vector<int32_t>* ids);
  // One more owner of a used block, or the first one of an idle block.
  void AddReference(int32_t id) noexcept;
  // One owner less; without owners the block is idle when it is kept, else free.
  void Release(int32_t id) noexcept;
  // Whether a used block becomes idle instead of free. An idle block that is not kept is free.
  void SetKept(int32_t id, bool kept) noexcept;

  // The only capacity number: all blocks but the null block.
  int32_t usable_blocks() const { return static_cast<int32_t>(blocks_.size()) - 1; }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_idle() const { return num_idle_; }
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
    // Neighbours in the ring of the idle blocks, the null block its head: newer of the head is the
    // longest idle one, older of the head the last that became idle.
    int32_t newer = 0;
    int32_t older = 0;
  };

  Block& At(int32_t id) { return blocks_[static_cast<size_t>(id)]; }
  Block& HandedOut(int32_t id);
  int32_t TakeOne();
  void BecomeIdle(int32_t id);
  void LeaveIdle(int32_t id);

  std::vector<Block> blocks_;  // [num_blocks]
  std::vector<int32_t> free_;  // last one goes first; has room for all
  int32_t num_idle_ = 0;
  // Counted by itself, so that the three states can be held against the pool.
  int32_t num_used_ = 0;
  int64_t num_references_ = 0;
  int64_t num_failures_ = 0;
  std::function<void(int32_t)> on_evict_;
};

}  // namespace flashquant
