#include "engine/scheduler/returning_blocks.h"

namespace flashquant {

void ReturningBlocks::Add(const BlockTable& blocks) {
  for (int32_t id : blocks.ids()) {
    if (++given_up_[id] == allocator_->references(id)) ++count_;
  }
}

void ReturningBlocks::Keep(std::span<const int32_t> ids) {
  for (int32_t id : ids) {
    int32_t& given_up = given_up_[id];
    if (given_up > 0 && given_up == allocator_->references(id)) --count_;
    --given_up;
  }
}

}  // namespace flashquant
