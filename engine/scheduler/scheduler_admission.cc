// Who is admitted to the running sequences, with which blocks, and at whose cost.
#include <algorithm>
#include <span>

#include "engine/scheduler/scheduler.h"
#include "kernels/base/check.h"

namespace flashquant {

Sequence* Scheduler::NextCandidate() const {
  Sequence* first = waiting_.empty() ? nullptr : &At(*waiting_.begin());
  for (const Rank& rank : preempted_) {
    if (first != nullptr && first->rank < rank) break;
    if (At(rank).runnable()) return &At(rank);
  }
  return first;
}

Scheduler::Admission Scheduler::PlanAdmission(const Sequence& sequence) const {
  Admission admission;
  if (config_.prefix_cache) {
    // At least one token is left to compute; tokens that the host has not seen match nothing.
    const int32_t most =
        std::min(sequence.num_tokens() - 1, sequence.num_tokens() - sequence.num_unknown);
    admission.chain = prefix_cache_.Find(sequence.cache_salt, sequence.tokens,
                                         most / config_.block_tokens, &admission.cached_ids);
  }
  // Its last tries were all cut short: this one gets everything it can need, so that it is the
  // last.
  const bool whole = config_.uniform_steps || sequence.num_preemptions >= kMaxPreemptions;
  admission.num_new_blocks = BlocksFor(whole ? sequence.max_kv_tokens() : sequence.num_tokens()) -
                             admission.chain.num_blocks;
  const auto idle = std::ranges::count_if(
      admission.cached_ids, [this](int32_t id) { return allocator_.references(id) == 0; });
  admission.num_available = allocator_.num_available() - static_cast<int32_t>(idle);
  return admission;
}

bool Scheduler::MayAdmit() const {
  return !out_of_blocks_ && num_running_unpaused() < config_.max_sequences;
}

Sequence* Scheduler::AdmitNext() {
  Sequence* sequence = NextCandidate();
  if (sequence == nullptr || !MayAdmit()) return nullptr;

  // The running ones will soon want a block each; without this the newcomer would be preempted at
  // once. Alone it needs none: that is what makes a request of exactly the pool's size run.
  const int32_t headroom = num_running_unpaused();
  Admission admission = PlanAdmission(*sequence);
  const int32_t missing = admission.num_new_blocks + headroom - admission.num_available;
  if (missing > 0) {
    if (!PreemptPausedFor(missing, admission.cached_ids)) return nullptr;
    admission = PlanAdmission(*sequence);  // what they gave up may be what it looks for
    if (admission.num_available < admission.num_new_blocks + headroom) return nullptr;
  }
  Admit(sequence, admission);
  return sequence;
}

void Scheduler::Admit(Sequence* sequence, const Admission& admission) {
  const int32_t num_cached = admission.chain.num_blocks * config_.block_tokens;
  sequence->blocks.Share(admission.cached_ids);
  FQ_CHECK(sequence->blocks.Grow(admission.num_new_blocks));
  sequence->chain = admission.chain;
  sequence->num_computed_tokens = sequence->num_finite_tokens = num_cached;
  if (config_.prefix_cache) {
    counters_.cache_hit_tokens += num_cached;
    counters_.cache_miss_tokens += sequence->num_tokens() - num_cached;
  }
  if (sequence->state == SequenceState::kWaiting) {
    running_.insert(waiting_.extract(sequence->rank));
    admitted_.push_back(sequence->id);
    sequence->num_cached_prompt_tokens = num_cached;
    counters_.prompt_tokens_cached += num_cached;
  } else {
    running_.insert(preempted_.extract(sequence->rank));
  }
  sequence->state = SequenceState::kRunning;
}

bool Scheduler::PreemptPausedFor(int32_t num_blocks, std::span<const int32_t> kept) {
  std::vector<Sequence*> paused;
  ReturningBlocks reachable = BlocksInFlight();
  reachable.Keep(kept);
  for (auto rank = running_.rbegin(); rank != running_.rend(); ++rank) {
    if (reachable.count() >= num_blocks) break;
    Sequence* sequence = &At(*rank);
    if (!sequence->paused || !MayBePreempted(*sequence)) continue;
    paused.push_back(sequence);
    reachable.Add(sequence->blocks);
  }
  if (reachable.count() < num_blocks) return false;
  for (Sequence* sequence : paused) Preempt(sequence, PreemptionCause::kBlocks);
  return true;
}

// Before the step is planned: a sequence that is in the plan can no longer be preempted.
void Scheduler::PreemptForPriority() {
  const Sequence* candidate = NextCandidate();
  if (candidate == nullptr) return;
  const bool hopeless = std::ranges::all_of(running_, [&](const Rank& rank) {
    return rank < candidate->rank || At(rank).priority >= candidate->priority;
  });
  if (hopeless) return;
  const Admission admission = PlanAdmission(*candidate);
  int32_t running = num_running_unpaused();
  ReturningBlocks reachable = BlocksInFlight();
  reachable.Keep(admission.cached_ids);
  const Sequence* first = nullptr;  // the first one always gets on
  for (const Rank& rank : running_) {
    const Sequence& sequence = At(rank);
    if (sequence.paused && MayBePreempted(sequence)) reachable.Add(sequence.blocks);
    if (first == nullptr && !sequence.paused && !sequence.at_limit()) first = &sequence;
  }
  const auto has_room = [&] {
    return running < config_.max_sequences &&
           admission.num_available + reachable.count() >= admission.num_new_blocks + running;
  };
  std::vector<Sequence*> victims;
  for (auto rank = running_.rbegin(); rank != running_.rend() && !has_room(); ++rank) {
    Sequence* sequence = &At(*rank);
    if (sequence->rank < candidate->rank) break;
    if (sequence->priority >= candidate->priority || sequence->paused || sequence == first ||
        !MayBePreempted(*sequence)) {
      continue;
    }
    victims.push_back(sequence);
    --running;
    reachable.Add(sequence->blocks);
  }
  if (!has_room()) return;
  for (Sequence* victim : victims) Preempt(victim, PreemptionCause::kPriority);
}

}  // namespace flashquant
