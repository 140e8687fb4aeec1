#include "engine/scheduler/block_allocator.h"

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
  Block& block = blocks_[static_cast<size_t>(id)];
  FQ_CHECK(block.references > 0);
  return block;
}

int32_t BlockAllocator::TakeOne() {
  if (!free_.empty()) {
    const int32_t id = free_.back();
    free_.pop_back();
    return id;
  }
  const int32_t id = idle_.begin()->second;
  idle_.erase(idle_.begin());
  blocks_[static_cast<size_t>(id)].kept = false;
  if (on_evict_) on_evict_(id);
  return id;
}

bool BlockAllocator::Allocate(int32_t count, std::vector<int32_t>* ids) {
  FQ_CHECK(count >= 0);
  if (count > num_available()) {
    ++num_failures_;
    return false;
  }
  for (int32_t i = 0; i < count; ++i) {
    const int32_t id = TakeOne();
    blocks_[static_cast<size_t>(id)].references = 1;
    ++num_used_;
    ++num_references_;
    ids->push_back(id);
  }
  return true;
}

void BlockAllocator::AddReference(int32_t id) {
  FQ_CHECK(id > kNullBlock && id <= usable_blocks());
  Block& block = blocks_[static_cast<size_t>(id)];
  if (block.references == 0) {
    FQ_CHECK(block.kept);
    idle_.erase(block.idle_since);
    ++num_used_;
  }
  ++block.references;
  ++num_references_;
}

void BlockAllocator::Release(int32_t id) {
  Block& block = HandedOut(id);
  --num_references_;
  if (--block.references > 0) return;
  --num_used_;
  if (block.kept) {
    block.idle_since = next_idle_++;
    idle_.emplace(block.idle_since, id);
  } else {
    free_.push_back(id);
  }
}

void BlockAllocator::SetKept(int32_t id, bool kept) {
  FQ_CHECK(id > kNullBlock && id <= usable_blocks());
  Block& block = blocks_[static_cast<size_t>(id)];
  FQ_CHECK(block.references > 0 || block.kept);
  if (block.references == 0 && !kept) {
    idle_.erase(block.idle_since);
    free_.push_back(id);
  }
  block.kept = kept;
}

}  // namespace flashquant
