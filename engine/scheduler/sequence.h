// Sequence: one request's tokens and counters inside the scheduler. Text, streams and clocks are
// not here.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/clock.h"
#include "engine/request.h"
#include "engine/scheduler/block_table.h"
#include "engine/scheduler/prefix_cache.h"
#include "engine/scheduler/step_plan.h"
#include "engine/scheduler/token_counts.h"

namespace flashquant {

enum class SequenceState {
  kWaiting,    // never scheduled, no blocks
  kRunning,    // has blocks; a paused one keeps them
  kPreempted,  // was running; blocks taken away, tokens kept, will be computed again
};

// What the scheduler needs of a request.
struct SequenceRequest {
  std::vector<int32_t> prompt_tokens;  // not empty
  SamplingParams sampling = {};
  StopConditions stop = {};
  int32_t max_output_tokens = 0;  // >= 1
  int32_t priority = 0;           // higher first
  std::string cache_salt = {};    // only equal ones share blocks
  TimePoint arrival{};
  // For each token of the prompt that must be computed, shorter prompts that arrive this much later
  // may pass. Zero = pure order of arrival.
  Duration patience_per_token{};
};

// A sequence's place in the order of all: its time of arrival, with some time off for its priority
// and some added for its length (Scheduler says how much).
struct Rank {
  TimePoint time{};
  SequenceId id = 0;
  auto operator<=>(const Rank&) const = default;
};

// Belongs to the scheduler. num_computed_tokens <= num_tokens() always.
class Sequence final {
 public:
  // `rank_time`: Rank::time. `num_cached_when_added`: tokens of the prompt that the prefix cache
  // has now.
  Sequence(SequenceId id, SequenceRequest request, TimePoint rank_time,
           int32_t num_cached_when_added, BlockAllocator* allocator);

  // Prompt and output tokens, the ones in flight included.
  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t num_output_tokens() const { return num_tokens() - num_prompt_tokens; }
  // Tokens whose keys and values are still to be computed before the next one can be drawn.
  int32_t num_remaining() const { return num_tokens() - num_computed_tokens; }
  // The same, but of one that waits without what the cache had of its prompt when it was added.
  int32_t num_expected_remaining() const {
    return num_remaining() - (state == SequenceState::kWaiting ? num_cached_when_added : 0);
  }
  // All that its limit allows is drawn or in flight: nothing is left to run.
  bool at_limit() const { return num_tokens() >= max_tokens; }
  // The next token's penalties need one that the host has not seen: it sits out until then.
  bool awaits_counts() const { return num_unknown > 0 && sampling.NeedsTokenCounts(); }
  bool runnable() const { return !paused && !at_limit() && !awaits_counts(); }
  // Positions that need a KV slot in the worst case: the last token is drawn, never computed.
  int32_t max_kv_tokens() const { return max_tokens - 1; }

  // Marks the next `count` tokens as computed by the plan `plan_index`; returns how many of them
  // had been computed before. When that reaches the last token, one unknown token is appended.
  int32_t Advance(int32_t count, int64_t plan_index);
  // Puts in the oldest unknown token.
  void Resolve(int32_t token_id);
  // As if nothing were computed; the tokens stay. Its blocks are the caller's business.
  void Preempt();

  const SequenceId id;
  const Rank rank;
  const int32_t priority;
  const std::string cache_salt;
  const int32_t num_prompt_tokens;
  const int32_t num_cached_when_added;
  const int32_t max_tokens;  // prompt + most output tokens
  const SamplingParams sampling;
  const StopConditions stop;

  SequenceState state = SequenceState::kWaiting;
  bool paused = false;
  std::vector<int32_t> tokens;      // the last num_unknown ones are sampled but not yet collected
  int32_t num_unknown = 0;          // 0..2
  TokenCounts token_counts;         // of the known ones
  int32_t num_computed_tokens = 0;  // as if all plans in flight had run
  int32_t greatest_computed = 0;    // over all tries, to count what is computed again
  int32_t num_finite_tokens = 0;    // of the computed ones: a committed, finite row has seen them
  int32_t num_cached_prompt_tokens = 0;  // found in the prefix cache when it was admitted first
  int32_t num_preemptions = 0;
  int64_t num_recomputed = 0;
  int64_t last_plan = -1;   // the last plan that it was in
  int32_t sample_row = -1;  // its row in that plan's StepResult::tokens
  BlockTable blocks;
  PrefixChain chain;  // of the first of these
};

}  // namespace flashquant
