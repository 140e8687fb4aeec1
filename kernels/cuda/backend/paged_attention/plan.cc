#include "kernels/cuda/backend/paged_attention/plan.h"

#include <algorithm>

#include "kernels/base/math_util.h"

namespace flashquant::cuda {
namespace {

constexpr int32_t kKeyTile = 64;

// The first key that the row at `position` sees.
int32_t FirstKey(int32_t position, int32_t sliding_window) {
  return sliding_window > 0 ? std::max(0, position + 1 - sliding_window) : 0;
}

// A sequence's query rows in the step.
struct Rows {
  int32_t first_token = 0;
  int32_t num_rows = 0;
  int32_t context = 0;
  int32_t first_block = 0;
  int32_t first_position() const { return context - num_rows; }
};

void AddPrefillRows(const Rows& rows, int32_t group, int32_t sliding_window, int32_t wide_rows,
                    AttentionPlan* plan) {
  const int32_t num_virtual = rows.num_rows * group;
  for (int32_t first_row = 0; first_row < num_virtual; first_row += wide_rows) {
    const int32_t num_rows = std::min(wide_rows, num_virtual - first_row);
    const int32_t first = rows.first_position() + first_row / group;
    const int32_t last = rows.first_position() + (first_row + num_rows - 1) / group;
    plan->wide.push_back({.first_token = rows.first_token,
                          .first_position = rows.first_position(),
                          .first_block = rows.first_block,
                          .first_row = first_row,
                          .num_rows = num_rows,
                          .first_key = FirstKey(first, sliding_window) / kKeyTile * kKeyTile,
                          .end_key = last + 1});
  }
}

}  // namespace

bool TakesDoubleBlocks(int head_dim, int group, bool fp8_cache, int shared_bytes) {
  const int element_bytes = fp8_cache ? 1 : 2;
  if (head_dim * element_bytes % 16 != 0) return false;
  const int padded = PaddedHeadDim(head_dim);
  const int exchange = ExchangeBytes(kMaxDecodeRanks, std::min(group, kNarrowRows), padded);
  return DecodeBlockBytes(padded, element_bytes, /*double_block=*/true) + exchange +
             kDecodeStaticBytes <=
         shared_bytes;
}

int PadSharedBytes(int bytes, int blocks_per_sm, const SharedMemoryLimits& limits) {
  if (blocks_per_sm == 0) return bytes;
  const int one_too_many = limits.of_sm / (blocks_per_sm + 1) - limits.reserved + 1;
  return std::max(bytes, std::min(one_too_many, limits.of_block - kDecodeStaticBytes));
}

DecodeSplit SplitDecode(int64_t num_units, int num_sms, bool cluster, bool double_blocks) {
  constexpr int64_t kSpreadBlocksPerSm = 2;
  constexpr int64_t kMostBlocksPerSm = 3;  // with heads of 128, by their shared memory
  DecodeSplit split;
  if (num_units > kMostBlocksPerSm * num_sms) {
    split.ranks = cluster ? 2 : 1;
    return split;
  }
  if (cluster && double_blocks && 2 * num_units <= num_sms) {
    split.double_blocks = true;
    split.blocks_per_sm = 1;
    split.ranks = 2;
    // Clusters of more than two leave SMs out, which may be too many: only while half would do.
    while (split.ranks < kMaxDecodeRanks && 2 * split.ranks * num_units <= num_sms / 2) {
      split.ranks *= 2;
    }
    return split;
  }
  split.ranks = kMaxDecodeRanks;
  while (split.ranks > 1 && num_units * split.ranks > kSpreadBlocksPerSm * num_sms) {
    split.ranks /= 2;
  }
  if (cluster && num_units * split.ranks <= kSpreadBlocksPerSm * num_sms) {
    split.blocks_per_sm = kSpreadBlocksPerSm;
  }
  return split;
}

AttentionPlan MakeAttentionPlan(const AttentionBatch& host_batch, int32_t group,
                                int32_t sliding_window, int32_t wide_rows) {
  AttentionPlan plan;
  for (int32_t sequence = 0; sequence < host_batch.num_sequences; ++sequence) {
    const Rows rows = {
        .first_token = host_batch.query_indptr[sequence],
        .num_rows = host_batch.query_indptr[sequence + 1] - host_batch.query_indptr[sequence],
        .context = host_batch.context_lengths[sequence],
        .first_block = host_batch.block_indptr[sequence]};
    if (rows.context == 0) continue;  // padding
    if (rows.num_rows == 1) {
      ++plan.num_single_rows;
    } else {
      AddPrefillRows(rows, group, sliding_window, wide_rows, &plan);
    }
  }
  return plan;
}

}  // namespace flashquant::cuda
