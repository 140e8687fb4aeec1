// BlockAllocator: ids of the KV blocks: a free list and reference counts. Ids only: the memory
// behind them is KvCache's. Which sequence owns a block is BlockTable's business.
#pragma once

#include <cstdint>
#include <vector>

namespace flashquant {

// Hands out the ids 1 .. num_blocks - 1; block 0 (kNullBlock) is never handed out. Engine thread
// only. Returning an id that is not handed out is a programmer error.
class BlockAllocator final {
 public:
  // num_blocks >= 1, the null block included.
  explicit BlockAllocator(int32_t num_blocks);
  BlockAllocator(const BlockAllocator&) = delete;
  BlockAllocator& operator=(const BlockAllocator&) = delete;

  // Appends `count` (>= 0) ids with one reference each to `ids`, or changes nothing and returns
  // false when fewer are free.
  bool Allocate(int32_t count, std::vector<int32_t>* ids);
  // One more owner of a handed-out block (a shared prefix).
  void AddReference(int32_t id);
  // One owner less; without owners the block is free again.
  void Release(int32_t id);

  // The only capacity number: all blocks but the null block.
  int32_t usable_blocks() const { return static_cast<int32_t>(references_.size()) - 1; }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_used() const { return usable_blocks() - num_free(); }
  // Calls of Allocate that were refused.
  int64_t num_failures() const { return num_failures_; }

 private:
  std::vector<int32_t> references_;  // [num_blocks], 0 = free
  std::vector<int32_t> free_;        // last one goes first
  int64_t num_failures_ = 0;
};

}  // namespace flashquant
