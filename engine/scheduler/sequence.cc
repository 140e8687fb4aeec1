// Bookkeeping of one sequence's tokens.
#include "engine/scheduler/sequence.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"

namespace flashquant {
namespace {

// Stands for a token that the device has drawn and the host has not seen; its value is never used.
constexpr int32_t kUnknownToken = 0;

}  // namespace

Sequence::Sequence(SequenceId sequence_id, SequenceRequest request, TimePoint rank_time,
                   int32_t cached_when_added, BlockAllocator* allocator)
    : id(sequence_id),
      rank{rank_time, sequence_id},
      priority(request.priority),
      cache_salt(std::move(request.cache_salt)),
      num_prompt_tokens(static_cast<int32_t>(request.prompt_tokens.size())),
      num_cached_when_added(cached_when_added),
      max_tokens(num_prompt_tokens + request.max_output_tokens),
      sampling(std::move(request.sampling)),
      stop(std::move(request.stop)),
      tokens(std::move(request.prompt_tokens)),
      token_counts(sampling, tokens),
      blocks(allocator) {
  FQ_CHECK(num_prompt_tokens >= 1 && max_tokens > num_prompt_tokens);
}

int32_t Sequence::Advance(int32_t count, int64_t plan_index) {
  FQ_CHECK(count >= 1 && count <= num_remaining());
  const int32_t recomputed = std::min(count, std::max(0, greatest_computed - num_computed_tokens));
  num_recomputed += recomputed;
  num_computed_tokens += count;
  greatest_computed = std::max(greatest_computed, num_computed_tokens);
  last_plan = plan_index;
  if (num_remaining() == 0) {
    tokens.push_back(kUnknownToken);
    ++num_unknown;
  }
  return recomputed;
}

void Sequence::Resolve(int32_t token_id) {
  FQ_CHECK(num_unknown > 0);
  tokens[tokens.size() - static_cast<size_t>(num_unknown)] = token_id;
  token_counts.AddOutput(token_id);
  --num_unknown;
}

void Sequence::Preempt() {
  state = SequenceState::kPreempted;
  num_computed_tokens = 0;
  num_finite_tokens = 0;
  chain = {};
  ++num_preemptions;
}

}  // namespace flashquant
