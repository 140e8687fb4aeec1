// How a step's prompts share what the decodes leave, told again: one order for prompts that have
// begun and those admitted, and a first one that leaves half where somebody behind gets done by it,
// and only there. Kept by a test beside the scheduler and held against its plans (not those of
// uniform_steps).
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/scheduler/scheduler.h"
#include "tests/engine/scheduler/scheduler_reference.h"

namespace flashquant {

// Fewer than Scheduler::kLookAhead sequences live.
class PrefillReference {
 public:
  PrefillReference(const SchedulerConfig& config, const Scheduler* scheduler,
                   const SchedulerReference* order)
      : config_(config), scheduler_(scheduler), order_(order) {}

  // Before each Schedule; `living`: a map by id of all sequences.
  template <typename Map>
  void Look(const Map& living) {
    decodes_.clear();
    for (const auto& [id, unused] : living) {
      const Sequence* sequence = scheduler_->Find(id);
      if (sequence->state == SequenceState::kRunning && sequence->num_remaining() == 1) {
        decodes_.emplace(id, sequence->num_preemptions);
      }
    }
  }

  // What is wrong with the plan that Schedule returned; empty: nothing.
  template <typename Map>
  std::string Check(const StepPlan& plan, const Map& living) const {
    std::vector<const SequenceStep*> chunks;
    std::set<SequenceId> planned;
    for (const SequenceStep& step : plan.sequences) {
      planned.insert(step.id);
      if (!Decodes(step.id)) chunks.push_back(&step);
    }
    if (chunks.empty()) return "";
    const auto before = [this](const SequenceStep* a, const SequenceStep* b) {
      return order_->Before(a->id, b->id);
    };
    if (!std::ranges::is_sorted(chunks, before)) return "prompts are not in their order";

    const SequenceStep& first = *chunks.front();
    const int32_t num_decodes = static_cast<int32_t>(planned.size() - chunks.size());
    const int32_t left = config_.token_budget - num_decodes;
    const int32_t half = std::max(1, left / 2);
    const auto count = static_cast<int32_t>(first.token_ids.size());
    bool wanted = false;    // by one behind that would finish in the other half
    bool left_out = false;  // such a one that runs and got nothing
    for (const auto& [id, unused] : living) {
      if (id == first.id || Decodes(id) || order_->Before(id, first.id)) continue;
      if (LeastRemaining(id, chunks) > left - half) continue;
      wanted = true;
      const Sequence& sequence = *scheduler_->Find(id);
      left_out |=
          sequence.state == SequenceState::kRunning && sequence.runnable() && !planned.contains(id);
    }
    const bool full = static_cast<int32_t>(planned.size()) == config_.max_sequences;
    if (left_out && count > half && !full) return "more than half, and one behind would finish";
    if (!wanted && count < left && !first.samples) return "cut, and nobody behind would finish";
    return "";
  }

 private:
  bool Decodes(SequenceId id) const {
    return decodes_.contains({id, scheduler_->Find(id)->num_preemptions});
  }
  // Before the step, by what was known when it was added or when it was planned.
  int32_t LeastRemaining(SequenceId id, const std::vector<const SequenceStep*>& chunks) const {
    const Sequence& sequence = *scheduler_->Find(id);
    const auto step = std::ranges::find(chunks, id, &SequenceStep::id);
    if (step == chunks.end()) return sequence.num_expected_remaining();
    const int32_t end = (*step)->first_position + static_cast<int32_t>((*step)->token_ids.size());
    const int32_t known = (*step)->samples ? end : sequence.num_tokens();
    return known - std::max((*step)->first_position, sequence.num_cached_when_added);
  }

  const SchedulerConfig config_;
  const Scheduler* const scheduler_;
  const SchedulerReference* const order_;
  // What could be a decode of the next step, and how often it had been preempted.
  std::set<std::pair<SequenceId, int32_t>> decodes_;
};

}  // namespace flashquant
