#include "engine/scheduler/block_allocator.h"

#include "engine/base/make_room.h"
#include "kernels/base/check.h"
#include "kernels/format/paged_kv.h"

namespace flashquant {

BlockAllocator::BlockAllocator(int32_t num_blocks) {
  FQ_CHECK(num_blocks >= 1);
  blocks_.resize(static_cast<size_t>(num_blocks));
  free_.reserve(blocks_.size());
  // The lowest id goes first.
  for (int32_t id = num_blocks - 1; id > kNullBlock; --id) free_.push_back(id);
}

BlockAllocator::Block& BlockAllocator::HandedOut(int32_t id) {
  FQ_CHECK(id > kNullBlock && id <= usable_blocks());
  FQ_CHECK(At(id).references > 0);
  return At(id);
}

void BlockAllocator::BecomeIdle(int32_t id) {
  Block& head = At(kNullBlock);
  At(id).newer = kNullBlock;
  At(id).older = head.older;
  At(head.older).newer = id;
  head.older = id;
  ++num_idle_;
}

void BlockAllocator::LeaveIdle(int32_t id) {
  At(At(id).older).newer = At(id).newer;
  At(At(id).newer).older = At(id).older;
  --num_idle_;
}

int32_t BlockAllocator::TakeOne() {
  if (!free_.empty()) {
    const int32_t id = free_.back();
    free_.pop_back();
    return id;
  }
  const int32_t id = At(kNullBlock).newer;
  LeaveIdle(id);
  At(id).kept = false;
  if (on_evict_) on_evict_(id);
  return id;
}

bool BlockAllocator::Allocate(int32_t count, std::vector<int32_t>* ids) {
  FQ_CHECK(count >= 0);
  if (count > num_available()) {
    ++num_failures_;
    return false;
  }
  MakeRoom(static_cast<size_t>(count), ids);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t id = TakeOne();
    At(id).references = 1;
    ++num_used_;
    ++num_references_;
    ids->push_back(id);
  }
  return true;
}

void BlockAllocator::AddReference(int32_t id) noexcept {
  FQ_CHECK(id > kNullBlock && id <= usable_blocks());
  Block& block = At(id);
  if (block.references == 0) {
    FQ_CHECK(block.kept);
    LeaveIdle(id);
    ++num_used_;
  }
  ++block.references;
  ++num_references_;
}

void BlockAllocator::Release(int32_t id) noexcept {
  Block& block = HandedOut(id);
  --num_references_;
  if (--block.references > 0) return;
  --num_used_;
  if (block.kept) {
    BecomeIdle(id);
  } else {
    free_.push_back(id);
  }
}

void BlockAllocator::SetKept(int32_t id, bool kept) noexcept {
  FQ_CHECK(id > kNullBlock && id <= usable_blocks());
  Block& block = At(id);
  FQ_CHECK(block.references > 0 || block.kept);
  if (block.references == 0 && !kept) {
    LeaveIdle(id);
    free_.push_back(id);
  }
  block.kept = kept;
}

}  // namespace flashquant
