// BlockTable: the list of KV blocks of one sequence, in position order; gives them back when it
// dies.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/scheduler/block_allocator.h"

namespace flashquant {

// Move-only and append-only. Its allocator must outlive it. Engine thread only.
class BlockTable final {
 public:
  explicit BlockTable(BlockAllocator* allocator) : allocator_(allocator) {}
  ~BlockTable() { Clear(); }
  BlockTable(BlockTable&& other) noexcept;
  BlockTable& operator=(BlockTable&& other) noexcept;
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // Appends `count` (>= 0) blocks, all or none: false when fewer are free.
  bool Grow(int32_t count) { return allocator_->Allocate(count, &ids_); }
  // Returns all blocks.
  void Clear();

  std::span<const int32_t> ids() const { return ids_; }
  int32_t num_blocks() const { return static_cast<int32_t>(ids_.size()); }

 private:
  BlockAllocator* allocator_;
  std::vector<int32_t> ids_;
};

}  // namespace flashquant
