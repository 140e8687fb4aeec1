// BlockTable: the list of KV blocks of one sequence, in position order; gives them back when it
// dies.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/scheduler/block_allocator.h"

namespace flashquant {

// Move-only. Holds one reference to each of its blocks. Its allocator must outlive it. Engine
// thread only. A call that finds no memory (std::bad_alloc) has changed nothing; Clear needs none.
class BlockTable final {
 public:
  explicit BlockTable(BlockAllocator* allocator) : allocator_(allocator) {}
  ~BlockTable() { Clear(); }
  BlockTable(BlockTable&& other) noexcept;
  BlockTable& operator=(BlockTable&& other) noexcept;
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // Makes room for `num_blocks` in all, so that Grow and Share up to there need no memory.
  void Reserve(int32_t num_blocks) { ids_.reserve(static_cast<size_t>(num_blocks)); }
  // Appends `count` (>= 0) new blocks, all or none: false when fewer are available.
  bool Grow(int32_t count) { return allocator_->Allocate(count, &ids_); }
  // Appends blocks that others own too, or that are idle.
  void Share(std::span<const int32_t> ids);
  // Puts the block `id`, used or idle, in the place of block `index`; returns a table with the one
  // that was there.
  BlockTable Replace(int32_t index, int32_t id);
  // Returns all blocks, the last one first: so a block is never longer idle than one before it.
  void Clear() noexcept;

  std::span<const int32_t> ids() const { return ids_; }
  int32_t num_blocks() const { return static_cast<int32_t>(ids_.size()); }

 private:
  BlockAllocator* allocator_;
  std::vector<int32_t> ids_;
};

}  // namespace flashquant
