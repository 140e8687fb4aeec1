#include "engine/scheduler/block_table.h"

#include <utility>

#include "engine/base/make_room.h"

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

void BlockTable::Share(std::span<const int32_t> ids) {
  MakeRoom(ids.size(), &ids_);
  for (int32_t id : ids) {
    allocator_->AddReference(id);
    ids_.push_back(id);
  }
}

BlockTable BlockTable::Replace(int32_t index, int32_t id) {
  BlockTable replaced(allocator_);
  replaced.ids_.reserve(1);  // before anything changes
  allocator_->AddReference(id);
  replaced.ids_.push_back(std::exchange(ids_[static_cast<size_t>(index)], id));
  return replaced;
}

void BlockTable::Clear() noexcept {
  for (; !ids_.empty(); ids_.pop_back()) allocator_->Release(ids_.back());
}

}  // namespace flashquant
