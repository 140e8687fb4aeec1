// The plan of a step, by the rules in the header. Who is admitted: scheduler_admission.cc.
#include "engine/scheduler/scheduler.h"

#include <algorithm>
#include <ranges>
#include <span>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/math_util.h"

namespace flashquant {

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(config),
      allocator_(config.num_blocks),
      prefix_cache_(&allocator_, config.block_tokens),
      returning_(config.num_blocks) {
  FQ_CHECK(config.max_sequences >= 1 && config.token_budget >= 1);
  FQ_CHECK(config.priority_ageing > Duration::zero());
  FQ_CHECK(config.block_tokens >= 1 && config.row_multiple >= 1);
}

int64_t Scheduler::BlocksNeeded(int64_t prompt_tokens, int64_t max_output_tokens,
                                int32_t block_tokens) {
  return CeilDiv<int64_t>(prompt_tokens + max_output_tokens - 1, block_tokens);
}

int32_t Scheduler::BlocksFor(int32_t num_tokens) const {
  return CeilDiv(num_tokens, config_.block_tokens);
}

void Scheduler::Add(SequenceId id, SequenceRequest request) {
  FQ_CHECK(sequences_.empty() || id > sequences_.rbegin()->first);
  const int32_t num_cached = CachedTokens(request);
  const TimePoint time = RankTime(request, num_cached);
  auto sequence = std::make_unique<Sequence>(id, std::move(request), time, num_cached, &allocator_);
  const int32_t most_blocks = BlocksFor(sequence->max_kv_tokens());
  FQ_CHECK(most_blocks <= usable_blocks());
  sequence->blocks.Reserve(most_blocks);
  // The first change is the last that takes memory.
  std::set<Rank> rank = {sequence->rank};
  sequences_.emplace(id, std::move(sequence));
  waiting_.merge(rank);
}

int32_t Scheduler::CachedTokens(const SequenceRequest& request) const {
  if (!config_.prefix_cache) return 0;
  const auto most = static_cast<int32_t>(request.prompt_tokens.size()) - 1;
  std::vector<int32_t> ids;
  const PrefixChain chain = prefix_cache_.Find(request.cache_salt, request.prompt_tokens,
                                               most / config_.block_tokens, &ids);
  return chain.num_blocks * config_.block_tokens;
}

TimePoint Scheduler::RankTime(const SequenceRequest& request, int32_t num_cached) const {
  const TimePoint time = request.arrival - request.priority * config_.priority_ageing;
  const Duration most = config_.priority_ageing / 2;
  const Duration per_token = request.patience_per_token;
  const auto num_tokens = static_cast<int64_t>(request.prompt_tokens.size()) - num_cached;
  return time + (per_token <= most / num_tokens ? num_tokens * per_token : most);
}

const StepPlan& Scheduler::Schedule() {
  FQ_CHECK(uncommitted_.size() <= 1);
  plan_ = StepPlan{};
  admitted_.clear();
  out_of_blocks_ = false;
  uncommitted_.push_back({.index = next_plan_index_, .samples = {}});

  Room room{.tokens = config_.token_budget, .sequences = config_.max_sequences};
  if (config_.uniform_steps) {
    PlanUniformStep(&room);
  } else {
    PreemptForPriority();
    PlanDecodes(&room);
    PlanPrefills(&room);
  }

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
  for (const Rank& rank : running_) {
    if (At(rank).runnable()) result.push_back(&At(rank));
  }
  return result;
}

void Scheduler::PlanDecodes(Room* room) {
  for (Sequence* sequence : RunnableSequences()) {
    if (room->tokens == 0 || room->sequences == 0) return;
    // A victim of an earlier one may have left the running set meanwhile.
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

void Scheduler::PlanUniformStep(Room* room) {
  const std::vector<Sequence*> runnable = RunnableSequences();
  const auto decodes = [](const Sequence* sequence) { return sequence->num_remaining() == 1; };
  if (last_was_chunk_ && std::ranges::any_of(runnable, decodes)) {
    last_was_chunk_ = false;
    return PlanDecodes(room);
  }
  const auto begun = std::ranges::find_if_not(runnable, decodes);
  Sequence* sequence = begun != runnable.end() ? *begun : AdmitNext();
  // A prompt of one token is a decode from the start.
  while (sequence != nullptr && decodes(sequence)) sequence = AdmitNext();
  last_was_chunk_ = sequence != nullptr;
  if (sequence == nullptr) return PlanDecodes(room);
  AddToPlan(sequence, std::min(room->tokens, sequence->num_remaining()));
}

void Scheduler::PlanPrefills(Room* room) {
  struct Chunk {
    Sequence* sequence;
    int32_t num_tokens;
  };
  std::vector<Chunk> chunks;
  std::vector<Sequence*> begun = RunnableSequences();
  std::erase_if(begun, [](const Sequence* sequence) { return sequence->num_remaining() < 2; });
  PrefillQueue queue{.begun = begun};
  const int32_t half = std::max(1, room->tokens / 2);
  while (room->tokens > 0 && room->sequences > 0) {
    Sequence* sequence = NextPrefill(&queue);
    if (sequence == nullptr) break;
    const bool cut = sequence->num_remaining() > half && room->tokens > half &&
                     SomeoneFinishesWithin(room->tokens - half, queue);
    const int32_t count = std::min(cut ? half : room->tokens, sequence->num_remaining());
    chunks.push_back({sequence, count});
    room->tokens -= count;
    --room->sequences;
  }
  // What nobody behind took goes to the first.
  for (Chunk& chunk : chunks) {
    const int32_t more = std::min(room->tokens, chunk.sequence->num_remaining() - chunk.num_tokens);
    chunk.num_tokens += more;
    room->tokens -= more;
    AddToPlan(chunk.sequence, chunk.num_tokens);
  }
}

Sequence* Scheduler::NextPrefill(PrefillQueue* queue) {
  const Sequence* candidate = queue->admits ? NextCandidate() : nullptr;
  const bool admit = candidate != nullptr &&
                     (queue->begun.empty() || candidate->rank < queue->begun.front()->rank);
  if (admit) {
    if (Sequence* admitted = AdmitNext()) return admitted;
    queue->admits = false;
  }
  if (queue->begun.empty()) return nullptr;
  Sequence* next = queue->begun.front();
  queue->begun = queue->begun.subspan(1);
  return next;
}

bool Scheduler::SomeoneFinishesWithin(int32_t num_tokens, const PrefillQueue& queue) const {
  const auto finishes = [num_tokens](const Sequence* sequence) {
    return sequence->runnable() && sequence->num_expected_remaining() <= num_tokens;
  };
  const auto any = [&](const std::set<Rank>& ranks) {
    return std::ranges::any_of(ranks | std::views::take(kLookAhead),
                               [&](const Rank& rank) { return finishes(&At(rank)); });
  };
  if (std::ranges::any_of(queue.begun | std::views::take(kLookAhead), finishes)) return true;
  return queue.admits && MayAdmit() && (any(waiting_) || any(preempted_));
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
    record.samples.push_back(
        {sequence->id, sequence->num_computed_tokens, sequence->num_preemptions});
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
  while (allocator_.num_available() + BlocksInFlight().count() < missing) {
    Sequence* victim = ChooseVictim(*sequence);
    if (victim == nullptr) return false;
    Preempt(victim, PreemptionCause::kBlocks);
  }
  // Else the missing ones come back when the plan in flight is committed.
  return allocator_.num_available() >= missing && sequence->blocks.Grow(missing);
}

bool Scheduler::MayBePreempted(const Sequence& sequence) const {
  if (config_.uniform_steps) return false;
  // One at its limit ends with the step in flight anyway.
  return sequence.num_preemptions < kMaxPreemptions && !sequence.at_limit();
}

Sequence* Scheduler::ChooseVictim(const Sequence& for_whom) {
  Sequence* last = nullptr;
  for (auto rank = running_.rbegin(); rank != running_.rend(); ++rank) {
    Sequence* sequence = &At(*rank);
    if (!MayBePreempted(*sequence) || sequence == &for_whom) continue;
    if (sequence->paused) return sequence;
    if (last == nullptr && sequence->rank > for_whom.rank) last = sequence;
  }
  return last;
}

void Scheduler::Preempt(Sequence* victim, PreemptionCause cause) {
  preempted_.insert(running_.extract(victim->rank));
  victim->Preempt();
  if (cause == PreemptionCause::kBlocks) {
    ++counters_.preemptions_for_blocks;
    out_of_blocks_ = true;
  } else {
    ++counters_.preemptions_for_priority;
  }
  if (InFlight(*victim)) {
    held_.push_back({victim->last_plan, victim->id, std::nullopt, std::move(victim->blocks)});
  } else {
    victim->blocks.Clear();
  }
}

bool Scheduler::InFlight(const Sequence& sequence) const {
  return !uncommitted_.empty() && sequence.last_plan >= uncommitted_.front().index;
}

}  // namespace flashquant
