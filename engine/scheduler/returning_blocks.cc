#include "engine/scheduler/returning_blocks.h"

#include "kernels/base/check.h"

namespace flashquant {

int32_t& ReturningBlocks::GivenUp(int32_t id) {
  ReturningBlocksMemory::Count& count = memory_->counts_[static_cast<size_t>(id)];
  if (count.counting != self_) count = {.counting = self_, .given_up = 0};
  return count.given_up;
}

void ReturningBlocks::Add(const BlockTable& blocks) {
  FQ_CHECK(memory_->counting_ == self_);
  for (int32_t id : blocks.ids()) {
    if (++GivenUp(id) == allocator_->references(id)) ++count_;
  }
}

void ReturningBlocks::Keep(std::span<const int32_t> ids) {
  FQ_CHECK(memory_->counting_ == self_);
  for (int32_t id : ids) {
    int32_t& given_up = GivenUp(id);
    if (given_up > 0 && given_up == allocator_->references(id)) --count_;
    --given_up;
  }
}

}  // namespace flashquant
