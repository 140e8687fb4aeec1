// What comes of a step, how a sequence leaves, and the counts of blocks.
#include <algorithm>
#include <cstdlib>
#include <span>
#include <utility>

#include "engine/scheduler/scheduler.h"
#include "kernels/base/check.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

absl::Status Scheduler::CheckAnswers(const UncommittedPlan& plan, const StepResult& result) const {
  if (result.tokens.size() != plan.samples.size()) {
    return InternalError("step {}: {} tokens for {} sampled rows", plan.index, result.tokens.size(),
                         plan.samples.size());
  }
  for (size_t row = 0; row < plan.samples.size(); ++row) {
    if (result.tokens[row].id == plan.samples[row].id) continue;
    return InternalError("step {}: row {} answers sequence {}, planned was {}", plan.index, row,
                         result.tokens[row].id, plan.samples[row].id);
  }
  return absl::OkStatus();
}

absl::StatusOr<CommitResult> Scheduler::Commit(const StepResult& result) {
  FQ_CHECK(!uncommitted_.empty());
  FQ_RETURN_IF_ERROR(CheckAnswers(uncommitted_.front(), result));
  const UncommittedPlan plan = std::move(uncommitted_.front());
  uncommitted_.pop_front();

  CommitResult committed;
  for (size_t row = 0; row < plan.samples.size(); ++row) {
    CommitSample(plan.samples[row], result.tokens[row], &committed);
  }
  std::erase_if(held_, [&](const HeldBlocks& held) {
    if (held.plan_index > plan.index) return false;
    if (held.reason) committed.blocks_returned.push_back(held.id);
    return true;
  });
  return committed;
}

void Scheduler::CommitSample(const Sample& sample, const SampledToken& sampled,
                             CommitResult* committed) {
  const auto found = sequences_.find(sample.id);
  if (found == sequences_.end()) {
    const auto held = std::ranges::find_if(held_, [&](const HeldBlocks& item) {
      return item.id == sample.id && item.reason.has_value();
    });
    FQ_CHECK(held != held_.end());
    committed->discarded.push_back({sample.id, *held->reason});
    return;
  }
  Sequence& sequence = *found->second;
  const int32_t output_index = sequence.num_output_tokens() - sequence.num_unknown;
  committed->tokens.push_back(
      {sample.id, sampled.token_id, output_index, sampled.non_finite, sampled.logprobs});
  if (sampled.non_finite) {
    ForgetBeginning(sequence);
    Release(sample.id, ReleaseReason::kError);
    return;
  }
  sequence.Resolve(sampled.token_id);
  // After a preemption its blocks are others than those that this step wrote.
  if (sequence.num_preemptions != sample.num_preemptions) return;
  // The row attends to all tokens before it: were one of their values not finite, it would not be.
  sequence.num_finite_tokens = sample.num_tokens;
  if (config_.prefix_cache) Publish(&sequence);
}

void Scheduler::ForgetBeginning(const Sequence& sequence) {
  const bool has_block = sequence.num_tokens() - sequence.num_unknown >= config_.block_tokens;
  std::vector<int32_t> ids;
  prefix_cache_.Find(sequence.cache_salt, sequence.tokens, has_block ? 1 : 0, &ids);
  if (!ids.empty()) prefix_cache_.Forget(ids.front());
}

void Scheduler::Publish(Sequence* sequence) {
  PrefixChain* chain = &sequence->chain;
  const int32_t num_full = sequence->num_finite_tokens / config_.block_tokens;
  while (!chain->broken && chain->num_blocks < num_full) {
    const int32_t index = chain->num_blocks;
    const int32_t own = sequence->blocks.ids()[static_cast<size_t>(index)];
    const std::span<const int32_t> tokens =
        std::span<const int32_t>(sequence->tokens)
            .subspan(static_cast<size_t>(index) * static_cast<size_t>(config_.block_tokens),
                     static_cast<size_t>(config_.block_tokens));
    const int32_t kept = prefix_cache_.Extend(sequence->cache_salt, tokens, own, chain);
    if (kept == own || kept < 0) continue;
    // Another sequence computed the same meanwhile. One copy is enough.
    BlockTable replaced = sequence->blocks.Replace(index, kept);
    if (InFlight(*sequence)) {
      held_.push_back({sequence->last_plan, sequence->id, std::nullopt, std::move(replaced)});
    }
  }
}

bool Scheduler::Release(SequenceId id, ReleaseReason reason) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return false;
  const std::unique_ptr<Sequence> sequence = std::move(found->second);
  sequences_.erase(found);
  waiting_.erase(sequence->rank);
  running_.erase(sequence->rank);
  preempted_.erase(sequence->rank);
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
      std::ranges::count_if(running_, [this](const Rank& rank) { return At(rank).paused; }));
}

std::optional<SequenceId> Scheduler::oldest_waiting() const {
  if (waiting_.empty()) return std::nullopt;
  const auto oldest = std::ranges::find_if(
      sequences_, [](const auto& entry) { return entry.second->state == SequenceState::kWaiting; });
  return oldest->first;
}

int32_t Scheduler::num_rows_to_fill() const {
  if (HasAdmissionCandidate()) return 0;
  int32_t rows = 0;
  for (const Rank& rank : running_) {
    if (!At(rank).runnable()) continue;
    if (At(rank).num_remaining() != 1) return 0;
    ++rows;
  }
  const int32_t most = std::min(config_.max_sequences, RoundUp(rows, config_.row_multiple));
  return std::max(0, most - rows);
}

int32_t Scheduler::num_held_blocks() const {
  int32_t total = 0;
  for (const HeldBlocks& held : held_) total += held.blocks.num_blocks();
  return total;
}

ReturningBlocks Scheduler::BlocksInFlight() const {
  ReturningBlocks returning(&allocator_, &returning_);
  for (const HeldBlocks& held : held_) returning.Add(held.blocks);
  for (const Rank& rank : running_) {
    const Sequence& sequence = At(rank);
    if (sequence.at_limit() && InFlight(sequence)) returning.Add(sequence.blocks);
  }
  return returning;
}

int64_t Scheduler::blocks_unaccounted() const {
  int64_t owned = num_held_blocks();
  for (const auto& [id, sequence] : sequences_) owned += sequence->blocks.num_blocks();
  const int64_t of_the_pool =
      usable_blocks() - allocator_.num_used() - allocator_.num_idle() - allocator_.num_free();
  return std::abs(of_the_pool) + std::abs(allocator_.num_references() - owned);
}

SchedulerCounters Scheduler::counters() const {
  SchedulerCounters counters = counters_;
  counters.allocation_failures = allocator_.num_failures();
  return counters;
}

}  // namespace flashquant
