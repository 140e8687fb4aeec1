// ReturningBlocks: how many blocks become available when several owners give theirs up: one that
// they share with others does only when the last of its owners is among them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/scheduler/block_allocator.h"
#include "engine/scheduler/block_table.h"

namespace flashquant {

// The memory of ReturningBlocks, taken once: counting needs none, and starts without clearing it.
class ReturningBlocksMemory final {
 public:
  // `num_blocks`: the null block included.
  explicit ReturningBlocksMemory(int32_t num_blocks) : counts_(static_cast<size_t>(num_blocks)) {}

 private:
  friend class ReturningBlocks;
  struct Count {
    int64_t counting = 0;  // by which one, else it is 0
    int32_t given_up = 0;  // references
  };
  std::vector<Count> counts_;  // by block
  int64_t counting_ = 0;       // the last one that began
};

// `allocator` and `memory` outlive it; the allocator does not change meanwhile. One at a time per
// memory: the next one ends it.
class ReturningBlocks final {
 public:
  ReturningBlocks(const BlockAllocator* allocator, ReturningBlocksMemory* memory)
      : allocator_(allocator), memory_(memory), self_(++memory->counting_) {}

  // One more owner that gives up.
  void Add(const BlockTable& blocks);
  // These get another owner: they do not count.
  void Keep(std::span<const int32_t> ids);

  int32_t count() const { return count_; }

 private:
  int32_t& GivenUp(int32_t id);

  const BlockAllocator* const allocator_;
  ReturningBlocksMemory* const memory_;
  const int64_t self_;
  int32_t count_ = 0;
};

}  // namespace flashquant
