// Layout of the paged KV cache. One K and one V array per layer:
// [num_blocks][num_kv_heads][block_tokens][head_dim], element type as the backend says
// (BackendInfo::kv_dtype).
//
// A KV slot is one token's place: slot = block_id * block_tokens + offset. Block 0 is the null
// block: never handed out, target of padding rows.
#pragma once

#include <cstdint>

namespace flashquant {

struct PagedKvGeometry {
  int32_t num_layers = 0;
  int32_t num_blocks = 0;  // the null block included
  int32_t block_tokens = 16;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;

  // Elements of K (or V) in one block of one layer.
  int64_t BlockElements() const {
    return static_cast<int64_t>(num_kv_heads) * block_tokens * head_dim;
  }
  // Element offset of (block, head, token offset 0, dimension 0).
  int64_t RowOffset(int64_t block, int32_t head, int32_t offset) const {
    return block * BlockElements() +
           (static_cast<int64_t>(head) * block_tokens + offset) * head_dim;
  }
};

inline constexpr int32_t kNullBlock = 0;

}  // namespace flashquant
