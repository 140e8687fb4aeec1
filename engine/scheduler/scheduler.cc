// The scheduling rules; stated in the header.
#include "engine/scheduler/scheduler.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(config), allocator_(config.num_blocks) {
  FQ_CHECK(config.max_sequences >= 1 && config.token_budget >= 1);
  FQ_CHECK(config.block_tokens >= 1 && config.row_multiple >= 1);
}

int64_t Scheduler::BlocksNeeded(int64_t prompt_tokens, int64_t max_output_tokens,
                                int32_t block_tokens) {
  return CeilDiv<int64_t>(prompt_tokens + max_output_tokens - 1, block_tokens);
}

int32_t Scheduler::BlocksFor(int32_t num_tokens) const {
  return CeilDiv(num_tokens, config_.block_tokens);
}

void Scheduler::Add(SequenceId id, std::vector<int32_t> prompt_tokens,
                    const SamplingParams& sampling, StopConditions stop,
                    int32_t max_output_tokens) {
  FQ_CHECK(sequences_.empty() || id > sequences_.rbegin()->first);
  auto sequence = std::make_unique<Sequence>(id, std::move(prompt_tokens), sampling,
                                             std::move(stop), max_output_tokens, &allocator_);
  FQ_CHECK(BlocksFor(sequence->max_kv_tokens()) <= usable_blocks());
  sequences_.emplace(id, std::move(sequence));
  waiting_.insert(id);
}

const StepPlan& Scheduler::Schedule() {
  FQ_CHECK(uncommitted_.size() <= 1);
  plan_ = StepPlan{};
  admitted_.clear();
  out_of_blocks_ = false;
  uncommitted_.push_back({.index = next_plan_index_, .samples = {}});

  Room room{.tokens = config_.token_budget, .sequences = config_.max_sequences};
  PlanDecodes(&room);
  PlanPrefills(&room);

  if (plan_.empty()) {
    uncommitted_.pop_back();
    return plan_;
  }
  ++next_plan_index_;
  plan_.num_rows = RoundUp(plan_.num_tokens, config_.row_multiple);
  return plan_;
}

std::vector<Sequence*> Scheduler::RunnableSequences() {
  std::vector<Sequence*> result;
  for (SequenceId id : running_) {
    Sequence* sequence = sequences_.at(id).get();
    if (sequence->runnable()) result.push_back(sequence);
  }
  return result;
}

void Scheduler::PlanDecodes(Room* room) {
  for (Sequence* sequence : RunnableSequences()) {
    if (room->tokens == 0 || room->sequences == 0) return;
    // A victim of an older one may have left the running set meanwhile.
    if (sequence->state != SequenceState::kRunning || sequence->num_remaining() != 1) continue;
    if (!EnsureBlocks(sequence, sequence->num_computed_tokens + 1)) {
      out_of_blocks_ = true;
      continue;
    }
    AddToPlan(sequence, 1);
    --room->tokens;
    --room->sequences;
  }
}

void Scheduler::PlanPrefills(Room* room) {
  struct Chunk {
    Sequence* sequence;
    int32_t num_tokens;
  };
  std::vector<Chunk> chunks;
  const int32_t half = std::max(1, room->tokens / 2);
  const auto take = [&](Sequence* sequence, bool others_behind) {
    const int32_t cap = others_behind ? std::min(half, room->tokens) : room->tokens;
    chunks.push_back({sequence, std::min(cap, sequence->num_remaining())});
    room->tokens -= chunks.back().num_tokens;
    --room->sequences;
  };

  std::vector<Sequence*> begun = RunnableSequences();
  std::erase_if(begun, [](const Sequence* sequence) { return sequence->num_remaining() < 2; });
  for (size_t i = 0; i < begun.size() && room->tokens > 0 && room->sequences > 0; ++i) {
    take(begun[i], i + 1 < begun.size() || HasAdmissionCandidate());
  }
  while (room->tokens > 0 && room->sequences > 0) {
    Sequence* sequence = AdmitNext();
    if (sequence == nullptr) break;
    take(sequence, HasAdmissionCandidate());
  }
  // What nobody behind took goes to the oldest.
  for (Chunk& chunk : chunks) {
    const int32_t more = std::min(room->tokens, chunk.sequence->num_remaining() - chunk.num_tokens);
    chunk.num_tokens += more;
    room->tokens -= more;
    AddToPlan(chunk.sequence, chunk.num_tokens);
  }
}

const Sequence* Scheduler::NextCandidate() const {
  for (SequenceId id : preempted_) {
    const Sequence* sequence = sequences_.at(id).get();
    if (sequence->runnable()) return sequence;
  }
  return waiting_.empty() ? nullptr : sequences_.at(*waiting_.begin()).get();
}

Sequence* Scheduler::AdmitNext() {
  const Sequence* candidate = NextCandidate();
  if (candidate == nullptr || out_of_blocks_) return nullptr;
  if (num_running() - num_paused() >= config_.max_sequences) return nullptr;

  Sequence* sequence = sequences_.at(candidate->id).get();
  // Its last tries were all cut short: this one gets everything it can need, so that it is the
  // last.
  const bool whole = sequence->num_preemptions >= kMaxPreemptions;
  const int32_t needed = BlocksFor(whole ? sequence->max_kv_tokens() : sequence->num_tokens());
  // The running ones will soon want a block each; without this the newcomer would be preempted at
  // once. Alone it needs none: that is what makes a request of exactly the pool's size run.
  const int32_t headroom = num_running() - num_paused();
  if (allocator_.num_free() < needed + headroom && !PreemptPausedFor(needed + headroom)) {
    return nullptr;
  }
  FQ_CHECK(sequence->blocks.Grow(needed));
  if (sequence->state == SequenceState::kWaiting) {
    waiting_.erase(sequence->id);
    admitted_.push_back(sequence->id);
  } else {
    preempted_.erase(sequence->id);
  }
  sequence->state = SequenceState::kRunning;
  running_.insert(sequence->id);
  return sequence;
}

void Scheduler::AddToPlan(Sequence* sequence, int32_t num_tokens) {
  const int32_t first = sequence->num_computed_tokens;
  const int32_t new_prompt_tokens =
      std::max(0, std::min(first + num_tokens, sequence->num_prompt_tokens) -
                      std::max(first, sequence->greatest_computed));
  UncommittedPlan& record = uncommitted_.back();

  SequenceStep step;
  step.id = sequence->id;
  step.first_position = first;
  step.block_ids = sequence->blocks.ids();
  step.sampling = &sequence->sampling;
  step.stop = &sequence->stop;
  step.samples = num_tokens == sequence->num_remaining();
  step.output_position = sequence->num_output_tokens();
  step.token_counts = sequence->token_counts.entries();
  step.end_tokens_banned = step.output_position + 1 < sequence->stop.min_output_tokens;
  if (step.samples && sequence->num_unknown > 0) step.previous_row = sequence->sample_row;

  counters_.prompt_tokens_computed += new_prompt_tokens;
  counters_.tokens_recomputed += sequence->Advance(num_tokens, record.index);
  if (step.samples) {
    sequence->sample_row = static_cast<int32_t>(record.samples.size());
    record.samples.push_back(sequence->id);
  }
  // After Advance: it may have moved the tokens.
  step.token_ids = std::span<const int32_t>(sequence->tokens)
                       .subspan(static_cast<size_t>(first), static_cast<size_t>(num_tokens));
  if (num_tokens > 1) plan_.phase = StepPhase::kPrefill;
  plan_.num_tokens += num_tokens;
  plan_.sequences.push_back(step);
}

bool Scheduler::EnsureBlocks(Sequence* sequence, int32_t num_tokens) {
  const int32_t missing = BlocksFor(num_tokens) - sequence->blocks.num_blocks();
  if (missing <= 0 || sequence->blocks.Grow(missing)) return true;
  while (allocator_.num_free() + num_returning_blocks() < missing) {
    Sequence* victim = ChooseVictim(*sequence);
    if (victim == nullptr) return false;
    Preempt(victim);
  }
  // Else the missing ones come back when the plan in flight is committed.
  return allocator_.num_free() >= missing && sequence->blocks.Grow(missing);
}

bool Scheduler::MayBePreempted(const Sequence& sequence) {
  // One at its limit ends with the step in flight anyway.
  return sequence.num_preemptions < kMaxPreemptions && !sequence.at_limit();
}

Sequence* Scheduler::ChooseVictim(const Sequence& for_whom) {
  Sequence* youngest = nullptr;
  for (auto id = running_.rbegin(); id != running_.rend(); ++id) {
    Sequence* sequence = sequences_.at(*id).get();
    if (!MayBePreempted(*sequence) || sequence == &for_whom) continue;
    if (sequence->paused) return sequence;
    if (youngest == nullptr && sequence->id > for_whom.id) youngest = sequence;
  }
  return youngest;
}

bool Scheduler::PreemptPausedFor(int32_t num_blocks) {
  std::vector<Sequence*> paused;
  int32_t reachable = allocator_.num_free() + num_returning_blocks();
  for (auto id = running_.rbegin(); id != running_.rend() && reachable < num_blocks; ++id) {
    Sequence* sequence = sequences_.at(*id).get();
    if (!sequence->paused || !MayBePreempted(*sequence)) continue;
    paused.push_back(sequence);
    reachable += sequence->blocks.num_blocks();
  }
  if (reachable < num_blocks) return false;
  for (Sequence* sequence : paused) Preempt(sequence);
  return allocator_.num_free() >= num_blocks;
}

void Scheduler::Preempt(Sequence* victim) {
  running_.erase(victim->id);
  preempted_.insert(victim->id);
  BlockTable blocks = victim->Preempt();
  ++counters_.preemptions;
  out_of_blocks_ = true;
  if (InFlight(*victim)) {
    held_.push_back({victim->last_plan, victim->id, std::nullopt, std::move(blocks)});
  }
}

bool Scheduler::InFlight(const Sequence& sequence) const {
  return !uncommitted_.empty() && sequence.last_plan >= uncommitted_.front().index;
}

absl::StatusOr<CommitResult> Scheduler::Commit(const StepResult& result) {
  FQ_CHECK(!uncommitted_.empty());
  const UncommittedPlan plan = uncommitted_.front();
  if (result.tokens.size() != plan.samples.size()) {
    return InternalError("step {}: {} tokens for {} sampled rows", plan.index, result.tokens.size(),
                         plan.samples.size());
  }
  for (size_t row = 0; row < plan.samples.size(); ++row) {
    if (result.tokens[row].id == plan.samples[row]) continue;
    return InternalError("step {}: row {} answers sequence {}, planned was {}", plan.index, row,
                         result.tokens[row].id, plan.samples[row]);
  }
  uncommitted_.pop_front();

  CommitResult committed;
  for (const SampledToken& sampled : result.tokens) {
    const auto found = sequences_.find(sampled.id);
    if (found == sequences_.end()) {
      const auto held = std::ranges::find_if(held_, [&](const HeldBlocks& item) {
        return item.id == sampled.id && item.reason.has_value();
      });
      FQ_CHECK(held != held_.end());
      committed.discarded.push_back({sampled.id, *held->reason});
      continue;
    }
    Sequence& sequence = *found->second;
    const int32_t output_index = sequence.num_output_tokens() - sequence.num_unknown;
    committed.tokens.push_back(
        {sampled.id, sampled.token_id, output_index, sampled.non_finite, sampled.logprobs});
    if (sampled.non_finite) {
      Release(sampled.id, ReleaseReason::kError);
    } else {
      sequence.Resolve(sampled.token_id);
    }
  }
  std::erase_if(held_, [&](const HeldBlocks& held) {
    if (held.plan_index > plan.index) return false;
    if (held.reason) committed.blocks_returned.push_back(held.id);
    return true;
  });
  return committed;
}

bool Scheduler::Release(SequenceId id, ReleaseReason reason) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return false;
  const std::unique_ptr<Sequence> sequence = std::move(found->second);
  sequences_.erase(found);
  waiting_.erase(id);
  running_.erase(id);
  preempted_.erase(id);
  if (!InFlight(*sequence)) return true;
  held_.push_back({sequence->last_plan, id, reason, std::move(sequence->blocks)});
  return false;
}

void Scheduler::SetPaused(SequenceId id, bool paused) {
  const auto found = sequences_.find(id);
  if (found != sequences_.end()) found->second->paused = paused;
}

const Sequence* Scheduler::Find(SequenceId id) const {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? nullptr : found->second.get();
}

int Scheduler::num_paused() const {
  return static_cast<int>(
      std::ranges::count_if(running_, [this](SequenceId id) { return sequences_.at(id)->paused; }));
}

std::optional<SequenceId> Scheduler::oldest_waiting() const {
  if (waiting_.empty()) return std::nullopt;
  return *waiting_.begin();
}

int32_t Scheduler::num_held_blocks() const {
  int32_t total = 0;
  for (const HeldBlocks& held : held_) total += held.blocks.num_blocks();
  return total;
}

int32_t Scheduler::num_returning_blocks() const {
  int32_t total = num_held_blocks();
  for (SequenceId id : running_) {
    const Sequence& sequence = *sequences_.at(id);
    if (sequence.at_limit() && InFlight(sequence)) total += sequence.blocks.num_blocks();
  }
  return total;
}

int64_t Scheduler::blocks_unaccounted() const {
  int64_t owned = num_held_blocks();
  for (const auto& [id, sequence] : sequences_) owned += sequence->blocks.num_blocks();
  return usable_blocks() - owned - allocator_.num_free();
}

SchedulerCounters Scheduler::counters() const {
  SchedulerCounters counters = counters_;
  counters.allocation_failures = allocator_.num_failures();
  return counters;
}

}  // namespace flashquant
