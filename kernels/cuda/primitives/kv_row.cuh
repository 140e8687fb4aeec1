// Where a token's keys or values lie in a paged cache: device twin of PagedKvGeometry::RowOffset.
#pragma once

#include <cstdint>

#include "kernels/format/paged_kv.h"

namespace flashquant::cuda {

// Element offset of (block, head, token offset in the block, dimension 0).
__device__ __forceinline__ int64_t KvRowOffset(const PagedKvGeometry& kv, int64_t block, int head,
                                               int offset) {
  return ((block * kv.num_kv_heads + head) * kv.block_tokens + offset) * kv.head_dim;
}

}  // namespace flashquant::cuda
