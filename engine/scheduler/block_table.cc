// Ownership of a sequence's KV blocks.
#include "engine/scheduler/block_table.h"

#include <utility>

namespace flashquant {

BlockTable::BlockTable(BlockTable&& other) noexcept
    : allocator_(other.allocator_), ids_(std::exchange(other.ids_, {})) {}

BlockTable& BlockTable::operator=(BlockTable&& other) noexcept {
  if (this != &other) {
    Clear();
    allocator_ = other.allocator_;
    ids_ = std::exchange(other.ids_, {});
  }
  return *this;
}

void BlockTable::Clear() {
  for (int32_t id : ids_) allocator_->Release(id);
  ids_.clear();
}

}  // namespace flashquant
