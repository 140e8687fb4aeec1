// How many KV blocks a server gets, from a memory plan and what the card has: the decision that is
// made before anything is allocated, with advice when nothing fits.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "engine/model/memory_plan.h"

namespace flashquant {

// Of the card, bytes.
struct MemoryBudget {
  int64_t total = 0;
  int64_t free = 0;       // before anything of the model is there
  double fraction = 0.9;  // of total: what this server takes at most
  int64_t reserve = 0;    // of free: stays free, for the desktop and others

  int64_t limit() const;
};

struct KvPoolRequest {
  int32_t num_blocks = 0;      // the null block included; 0 = from kv_cache_bytes
  int64_t kv_cache_bytes = 0;  // 0 = what max_sequences full contexts need, at most what is left
  int32_t max_sequences = 64;
  int32_t block_tokens = 16;
};

// The number of blocks, the null block included. UNAVAILABLE, saying what is needed, what there is
// and which options to change, when the model, the pool that was asked for, or one full context
// does not fit.
absl::StatusOr<int32_t> ChooseKvBlocks(const MemoryPlan& plan, const MemoryBudget& budget,
                                       const KvPoolRequest& request);

}  // namespace flashquant
