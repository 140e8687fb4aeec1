// What SchedulerConfig::uniform_steps promises, told again: a sequence's tokens run in the steps in
// which they would run alone, one chunk of one prompt or the decodes of all, in turn. Kept by a
// test beside the scheduler and held against its plans.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>

#include "engine/scheduler/scheduler.h"

namespace flashquant {

class UniformStepsReference {
 public:
  UniformStepsReference(const SchedulerConfig& config, const Scheduler* scheduler)
      : config_(config), scheduler_(scheduler) {}

  // Before each Schedule; `living`: a map by id of all sequences.
  template <typename Map>
  void Look(const Map& living) {
    decodes_.clear();
    for (const auto& [id, unused] : living) {
      const Sequence* sequence = scheduler_->Find(id);
      if (sequence->state != SequenceState::kRunning || !sequence->runnable()) continue;
      if (sequence->num_remaining() == 1) decodes_.insert(id);
    }
  }

  // What is wrong with the plan that Schedule returned; empty: nothing.
  std::string Check(const StepPlan& plan) {
    if (plan.empty()) {
      last_was_chunk_ = false;
      return decodes_.empty() ? "" : "decodes are left out";
    }
    for (const SequenceStep& step : plan.sequences) {
      const Sequence& sequence = *scheduler_->Find(step.id);
      if (sequence.blocks.num_blocks() * config_.block_tokens < sequence.max_kv_tokens()) {
        return "runs without blocks for its whole length";
      }
      if (static_cast<int32_t>(step.token_ids.size()) != StepAlone(sequence, step.first_position)) {
        return "a chunk that is not the one it would be alone";
      }
    }
    const bool chunk = plan.sequences.front().token_ids.size() > 1;
    if (chunk && plan.sequences.size() > 1) return "a chunk beside others";
    if (chunk && last_was_chunk_ && !decodes_.empty()) return "two chunks while others decode";
    last_was_chunk_ = chunk;
    return chunk ? "" : CheckDecodes(plan);
  }

 private:
  // The tokens of its step that begins at `position`.
  int32_t StepAlone(const Sequence& sequence, int32_t position) const {
    const int32_t left = sequence.num_prompt_tokens - position;
    if (left <= 1) return 1;
    // Chunks begin where those before them end.
    if (position % config_.token_budget != 0) return -1;
    return std::min(left, config_.token_budget);
  }

  std::string CheckDecodes(const StepPlan& plan) const {
    const auto limit = static_cast<size_t>(std::min(config_.max_sequences, config_.token_budget));
    std::set<SequenceId> left_out = decodes_;
    for (const SequenceStep& step : plan.sequences) left_out.erase(step.id);
    if (!left_out.empty() && plan.sequences.size() < limit) return "a decode is left out";
    return "";
  }

  const SchedulerConfig config_;
  const Scheduler* const scheduler_;
  std::set<SequenceId> decodes_;  // what could be a decode of the next step
  bool last_was_chunk_ = false;
};

}  // namespace flashquant
