// EngineConfig: every knob of the engine with its default, in one place.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "engine/base/error_reason.h"

namespace flashquant {

struct EngineConfig {
  int32_t context_length = 0;  // tokens a sequence may have; 0 = the model's
  int32_t max_sequences = 64;  // sequences in one step
  int32_t token_budget = 256;  // tokens in one step; bounds how long one step can take
  int32_t max_waiting = 1024;  // accepted, not yet scheduled; beyond: RESOURCE_EXHAUSTED
  int32_t block_tokens = 16;   // tokens per KV block
  int32_t num_blocks = 0;      // KV blocks, the null block included; 0 = from memory
  int32_t row_multiple = 1;    // decode batches are padded to this; the backend's by default
  bool run_ahead = false;      // launch a step before the last one is collected
  // Every greedy answer is that of its solo run, bit for bit: steps of one shape, no prefix cache,
  // no preemption (SchedulerConfig::uniform_steps).
  bool deterministic = false;
  bool prefix_cache = true;  // keep what prompts have in common
  // Ageing: a step of priority is worth this much of waiting.
  int32_t priority_ageing_ms = 2000;
  // Shorter prompts may pass one that arrived this many times its own prefill time before them, at
  // most half of priority_ageing_ms. 0 = off.
  double prompt_patience = 4;

  // A decode step whose rows are no multiple of row_multiple waits this long for requests that
  // could fill them, but never so long that tokens come later than gap_target_ms after the ones
  // before (engine/fill_wait.h). 0 = off.
  double fill_wait_ms = 0;
  double gap_target_ms = 50;

  // FAILED_PRECONDITION naming the key, the range and the value. The two zeros that mean "to be
  // filled in" pass here; Engine::Create refuses them.
  absl::Status Validate() const;
};

}  // namespace flashquant
