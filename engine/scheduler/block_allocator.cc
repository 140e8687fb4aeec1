// Free list and reference counts of the KV blocks.
#include "engine/scheduler/block_allocator.h"

#include "kernels/base/check.h"
#include "kernels/format/paged_kv.h"

namespace flashquant {

BlockAllocator::BlockAllocator(int32_t num_blocks) {
  FQ_CHECK(num_blocks >= 1);
  references_.resize(static_cast<size_t>(num_blocks), 0);
  free_.reserve(references_.size());
  for (int32_t id = num_blocks - 1; id > kNullBlock; --id) free_.push_back(id);
}

bool BlockAllocator::Allocate(int32_t count, std::vector<int32_t>* ids) {
  FQ_CHECK(count >= 0);
  if (count > num_free()) {
    ++num_failures_;
    return false;
  }
  for (int32_t i = 0; i < count; ++i) {
    const int32_t id = free_.back();
    free_.pop_back();
    references_[static_cast<size_t>(id)] = 1;
    ids->push_back(id);
  }
  return true;
}

void BlockAllocator::AddReference(int32_t id) {
  FQ_CHECK(id > kNullBlock && id <= usable_blocks());
  FQ_CHECK(references_[static_cast<size_t>(id)] > 0);
  ++references_[static_cast<size_t>(id)];
}

void BlockAllocator::Release(int32_t id) {
  FQ_CHECK(id > kNullBlock && id <= usable_blocks());
  FQ_CHECK(references_[static_cast<size_t>(id)] > 0);
  if (--references_[static_cast<size_t>(id)] == 0) free_.push_back(id);
}

}  // namespace flashquant
