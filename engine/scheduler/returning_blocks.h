// ReturningBlocks: how many blocks become available when several owners give theirs up: one that
// they share with others does only when the last of its owners is among them.
#pragma once

#include <cstdint>
#include <span>

#include "absl/container/flat_hash_map.h"
#include "engine/scheduler/block_allocator.h"
#include "engine/scheduler/block_table.h"

namespace flashquant {

// `allocator` outlives it and does not change meanwhile.
class ReturningBlocks final {
 public:
  explicit ReturningBlocks(const BlockAllocator* allocator) : allocator_(allocator) {}

  // One more owner that gives up.
  void Add(const BlockTable& blocks);
  // These get another owner: they do not count.
  void Keep(std::span<const int32_t> ids);

  int32_t count() const { return count_; }

 private:
  const BlockAllocator* const allocator_;
  absl::flat_hash_map<int32_t, int32_t> given_up_;  // references, by block
  int32_t count_ = 0;
};

}  // namespace flashquant
