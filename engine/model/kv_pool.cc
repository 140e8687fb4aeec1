#include "engine/model/kv_pool.h"

#include <algorithm>
#include <string>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxBlocks = int64_t{1} << 30;

int64_t MiB(int64_t num_bytes) { return num_bytes >> 20; }

std::string DescribeLimit(const MemoryBudget& budget) {
  return fmt::format("{} MiB may be taken ({:.0f}% of {} MiB, {} MiB free, {} MiB reserved)",
                     MiB(budget.limit()), 100 * budget.fraction, MiB(budget.total),
                     MiB(budget.free), MiB(budget.reserve));
}

absl::Status CheckWithoutPool(const MemoryPlan& plan, const MemoryBudget& budget) {
  const int64_t needed = plan.without_pool() + plan.token;
  if (needed <= budget.limit()) return absl::OkStatus();
  const char* const advice =
      plan.weights() > budget.limit()
          ? "quantize the model (flashquant quantize, with --lm-head int4) or use a smaller one"
          : "lower --token-budget or --max-sequences";
  return UnavailableError(
      "GPU memory: the model needs {} MiB besides keys and values (weights {}, buffers {}), {}: "
      "raise --gpu-memory-fraction, lower --gpu-reserve-bytes, or {}",
      MiB(plan.without_pool()), MiB(plan.weights()), MiB(plan.without_pool() - plan.weights()),
      DescribeLimit(budget), advice);
}

}  // namespace

int64_t MemoryBudget::limit() const {
  const auto share = static_cast<int64_t>(fraction * static_cast<double>(total));
  return std::max<int64_t>(0, std::min(share, free - reserve));
}

absl::StatusOr<int32_t> ChooseKvBlocks(const MemoryPlan& plan, const MemoryBudget& budget,
                                       const KvPoolRequest& request) {
  FQ_RETURN_IF_ERROR(CheckWithoutPool(plan, budget));
  const int64_t left = budget.limit() - plan.without_pool();
  const int64_t block = plan.token * request.block_tokens;
  const int64_t blocks_per_context = CeilDiv(plan.context, block);
  int64_t num_blocks = request.num_blocks;
  if (num_blocks == 0 && request.kv_cache_bytes > 0) num_blocks = request.kv_cache_bytes / block;
  if (num_blocks * block > left) {
    return UnavailableError(
        "GPU memory: a KV pool of {} MiB besides {} MiB for the model, {}: lower --kv-cache-bytes "
        "to {} (or --kv-blocks to {}), or raise --gpu-memory-fraction",
        MiB(num_blocks * block), MiB(plan.without_pool()), DescribeLimit(budget), left,
        left / block);
  }
  const bool derived = num_blocks == 0;
  if (derived) num_blocks = std::min(blocks_per_context * request.max_sequences + 1, left / block);
  if (num_blocks - 1 < blocks_per_context) {
    const int64_t tokens = std::max<int64_t>(0, num_blocks - 1) * request.block_tokens;
    return UnavailableError(
        "GPU memory: one context of {} tokens needs {} MiB of keys and values, the pool has {} "
        "MiB{}{}: lower --context-length to {} or less, or {}",
        plan.context_length, MiB(plan.context + block), MiB(num_blocks * block),
        derived ? "; besides the model " : "", derived ? DescribeLimit(budget) : std::string(),
        tokens,
        derived ? "raise --gpu-memory-fraction" : "raise --kv-cache-bytes (or --kv-blocks)");
  }
  return static_cast<int32_t>(std::min(num_blocks, kMaxBlocks));
}

}  // namespace flashquant
