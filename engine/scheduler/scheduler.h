// Scheduler: decides which tokens of which sequences run in the next step (continuous batching with
// a token budget, chunked prefill, preemption by recompute).
//
// Pure: the same calls give the same plans; no clock, thread, lock, device or metric. Why a
// sequence ends (stop strings, deadlines, cancels) is decided outside and told through Release.
//
// Rules, each with a test of its name in tests/engine/scheduler:
//  - sequences have an order (Rank): their time of arrival, less priority_ageing for each step of
//    priority, plus their patience: patience_per_token for each token of the prompt that is not in
//    the prefix cache when they are added, at most half of priority_ageing. So short prompts pass
//    longer ones within a bound, and no length outweighs a step of priority. A request is overtaken
//    only by those that arrive less than (their priority - its own) * priority_ageing + its
//    patience - their own after it: however many come, nobody starves;
//  - decodes first, in that order; then prompts in that order, those that have begun and those to
//    be admitted alike. Once the next one cannot be admitted, only those that have begun go on;
//  - a chunk takes at most half of what the decodes leave while one behind it would finish its
//    prompt in the rest; what nobody takes goes to the first. Of those behind, the first kLookAhead
//    of each kind are looked at;
//  - admission: preempted and waiting ones alike, head of line first, with blocks for all tokens
//    known so far; while others run, one free block for each stays;
//  - a sequence without room takes the blocks of a paused one, else of the last running one that is
//    behind itself, else it sits out the step. So the first running one always gets on;
//  - the head of line, when it has no room, takes that of running ones of lower priority behind it,
//    the last of them first, but never of the first running one, and only when that makes room
//    enough;
//  - after kMaxPreemptions a sequence is admitted with blocks for its whole length and is
//    no victim;
//  - with prefix_cache a sequence is admitted with the kept blocks that hold how its tokens begin,
//    for the same cache salt, and computes the rest: at least its last token. Full blocks are kept
//    once a row that has seen them was drawn from, finite, in a committed step; they are given up,
//    the longest unused first, when others need room. When a row is not finite, all that begins
//    with its sequence's first block is forgotten;
//  - with uniform_steps a sequence's tokens always run in the same steps, whoever else is there: a
//    step is one chunk, as long as the budget allows, of one sequence, or the decodes of all, the
//    two kinds in turn; who is admitted has blocks for its whole length and is no victim.
//
// Run-ahead: Schedule may be called while one earlier plan is uncommitted. The token that plan
// draws is then unknown, and the new plan refers to it by SequenceStep::previous_row. A sequence
// with penalties is not run ahead: they need that token, so it sits out every other step. Blocks
// given up while a plan in flight could still write them become free when that plan is committed.
//
// Source: the ideas are those of Orca (continuous batching), Sarathi (chunked prefill) and vLLM
// (paged blocks, recompute).
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/scheduler/block_allocator.h"
#include "engine/scheduler/prefix_cache.h"
#include "engine/scheduler/returning_blocks.h"
#include "engine/scheduler/sequence.h"
#include "engine/scheduler/step_plan.h"

namespace flashquant {

struct SchedulerConfig {
  int32_t max_sequences = 64;  // in one step
  int32_t token_budget = 256;  // real rows in one step
  int32_t block_tokens = 16;
  int32_t num_blocks = 0;  // the null block included
  int32_t row_multiple = 1;
  bool prefix_cache = false;
  bool uniform_steps = false;
  Duration priority_ageing = std::chrono::seconds(2);  // per step of priority, above 0
};

enum class ReleaseReason { kFinished, kCancelled, kDeadline, kError };

// One token that a step drew for a living sequence.
struct CommittedToken {
  SequenceId id = 0;
  int32_t token_id = 0;
  int32_t output_index = 0;  // 0 = the first output token
  // The row's logits were not finite: token_id is void and the sequence is already released.
  bool non_finite = false;
  std::optional<OutputLogprobs> logprobs = std::nullopt;  // when the request asks for them
};

// One token that a step drew for a sequence released meanwhile.
struct DiscardedToken {
  SequenceId id = 0;
  ReleaseReason reason = ReleaseReason::kFinished;
};

struct CommitResult {
  std::vector<CommittedToken> tokens;  // in the plan's order
  std::vector<DiscardedToken> discarded;
  std::vector<SequenceId> blocks_returned;  // released ones whose blocks were held back until now
};

// Sums since the start.
struct SchedulerCounters {
  int64_t prompt_tokens_computed = 0;  // for the first time
  int64_t prompt_tokens_cached = 0;    // never computed: found when admitted for the first time
  int64_t tokens_recomputed = 0;
  int64_t preemptions_for_blocks = 0;
  int64_t preemptions_for_priority = 0;
  // Of the tokens known at each admission, first or not.
  int64_t cache_hit_tokens = 0;
  int64_t cache_miss_tokens = 0;
  int64_t allocation_failures = 0;  // asked for blocks and not given
};

// Where a call other than Add ends with std::bad_alloc, the scheduler is good for nothing any more
// but to be destroyed.
class Scheduler final {
 public:
  static constexpr int32_t kMaxPreemptions = 8;
  // Thousands may wait: a step must not cost a look at each, and who is far behind hardly gets a
  // part of it.
  static constexpr int32_t kLookAhead = 64;

  // All values >= 1.
  explicit Scheduler(const SchedulerConfig& config);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Blocks that such a request needs in the worst case. A request may be added only if it is at
  // most usable_blocks(): then it always gets its turn.
  static int64_t BlocksNeeded(int64_t prompt_tokens, int64_t max_output_tokens,
                              int32_t block_tokens);
  int32_t usable_blocks() const { return allocator_.usable_blocks(); }

  // Queues a sequence. Ids rise from call to call; they order those of equal Rank::time. Changes
  // nothing when it finds no memory (std::bad_alloc). Its block table has room for all it can need.
  void Add(SequenceId id, SequenceRequest request);

  // The next step; empty when nothing can run now. Valid until the next call of a non-const
  // function. At most one plan may be uncommitted before the call. A plan that is not empty must be
  // committed.
  const StepPlan& Schedule();
  // Sequences that the last Schedule scheduled for the first time.
  const std::vector<SequenceId>& admitted() const { return admitted_; }

  // Applies the result of the oldest uncommitted plan. INTERNAL when it does not answer that plan.
  absl::StatusOr<CommitResult> Commit(const StepResult& result);

  // The one way out, from every state. Returns whether the blocks are back at once; else a later
  // CommitResult names the id. False also for an id that is not there: harmless.
  bool Release(SequenceId id, ReleaseReason reason);

  // A paused sequence is not scheduled and keeps its blocks unless others need them. No effect on
  // an unknown id.
  void SetPaused(SequenceId id, bool paused);

  // Forgets all kept contents. Blocks that sequences share stay shared.
  void ClearPrefixCache() { prefix_cache_.Clear(); }

  // Null when unknown.
  const Sequence* Find(SequenceId id) const;
  int num_waiting() const { return static_cast<int>(waiting_.size()); }
  int num_preempted() const { return static_cast<int>(preempted_.size()); }
  // Paused ones included.
  int num_running() const { return static_cast<int>(running_.size()); }
  // Of the running ones.
  int num_paused() const;
  int num_uncommitted() const { return static_cast<int>(uncommitted_.size()); }
  // By arrival.
  std::optional<SequenceId> oldest_waiting() const;
  // The padding of the next step, if nobody arrives meanwhile and it is nothing but decodes; else
  // 0.
  int32_t num_rows_to_fill() const;
  // Owned by living sequences or plans in flight.
  int32_t blocks_used() const { return allocator_.num_used(); }
  // Kept for their contents alone.
  int32_t blocks_cached() const { return allocator_.num_idle(); }
  // Owners of a block.
  int32_t block_references(int32_t id) const { return allocator_.references(id); }
  // Blocks that are neither used, cached nor free, and references that no table holds: 0, or it is
  // a bug.
  int64_t blocks_unaccounted() const;
  SchedulerCounters counters() const;

 private:
  struct Sample {
    SequenceId id = 0;
    int32_t num_tokens = 0;       // computed once the plan has run
    int32_t num_preemptions = 0;  // of the sequence when it was planned
  };
  struct UncommittedPlan {
    int64_t index = 0;
    std::vector<Sample> samples;  // by row
  };
  // Blocks of a sequence that the plan `plan_index` may still write; `reason` when it was released.
  struct HeldBlocks {
    int64_t plan_index = 0;
    SequenceId id = 0;
    std::optional<ReleaseReason> reason;
    BlockTable blocks;
  };
  // What is left of the step that is being planned.
  struct Room {
    int32_t tokens = 0;
    int32_t sequences = 0;
  };

  // Who may still get a chunk of the step: prompts that have begun, by rank, and those to be
  // admitted, unless the first of them found no room.
  struct PrefillQueue {
    std::span<Sequence* const> begun;
    bool admits = true;
  };

  // What it takes to admit a sequence now.
  struct Admission {
    PrefixChain chain;
    std::vector<int32_t> cached_ids;
    int32_t num_new_blocks = 0;
    int32_t num_available = 0;  // besides cached_ids
  };
  enum class PreemptionCause { kBlocks, kPriority };

  void PlanDecodes(Room* room);
  void PlanUniformStep(Room* room);
  void PlanPrefills(Room* room);
  // Takes out the first in the order and admits it if need be. Null when nobody is left.
  Sequence* NextPrefill(PrefillQueue* queue);
  bool SomeoneFinishesWithin(int32_t num_tokens, const PrefillQueue& queue) const;
  void AddToPlan(Sequence* sequence, int32_t num_tokens);
  // Tokens of the prompt that the prefix cache has.
  int32_t CachedTokens(const SequenceRequest& request) const;
  TimePoint RankTime(const SequenceRequest& request, int32_t num_cached) const;
  std::vector<Sequence*> RunnableSequences();
  Sequence& At(const Rank& rank) const { return *sequences_.at(rank.id); }

  // scheduler_admission.cc
  bool MayAdmit() const;
  Sequence* AdmitNext();
  bool HasAdmissionCandidate() const { return NextCandidate() != nullptr; }
  Sequence* NextCandidate() const;
  Admission PlanAdmission(const Sequence& sequence) const;
  void Admit(Sequence* sequence, const Admission& admission);
  void PreemptForPriority();
  // `kept`: blocks that the candidate shares.
  bool PreemptPausedFor(int32_t num_blocks, std::span<const int32_t> kept);
  int32_t num_running_unpaused() const { return num_running() - num_paused(); }

  // Gives the sequence blocks for `num_tokens` tokens, at the cost of victims if need be.
  bool EnsureBlocks(Sequence* sequence, int32_t num_tokens);
  Sequence* ChooseVictim(const Sequence& for_whom);
  void Preempt(Sequence* victim, PreemptionCause cause);
  bool InFlight(const Sequence& sequence) const;
  bool MayBePreempted(const Sequence& sequence) const;

  // scheduler_commit.cc
  absl::Status CheckAnswers(const UncommittedPlan& plan, const StepResult& result) const;
  void CommitSample(const Sample& sample, const SampledToken& sampled, CommitResult* committed);
  // Takes what begins with the sequence's first block out of the prefix cache.
  void ForgetBeginning(const Sequence& sequence);
  // Puts the full blocks that are known to be finite into the prefix cache.
  void Publish(Sequence* sequence);
  int32_t num_held_blocks() const;
  // Blocks that are available once the plan in flight is committed. Valid until the next call.
  ReturningBlocks BlocksInFlight() const;
  int32_t BlocksFor(int32_t num_tokens) const;

  const SchedulerConfig config_;
  BlockAllocator allocator_;  // before everything that holds blocks
  PrefixCache prefix_cache_;
  std::map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::set<Rank> waiting_, running_, preempted_;  // counts are derived from these

  StepPlan plan_;
  std::vector<SequenceId> admitted_;
  bool last_was_chunk_ = false;  // of the uniform steps
  bool out_of_blocks_ = false;   // someone sat out or was preempted in this Schedule: no admission
  int64_t next_plan_index_ = 0;
  std::deque<UncommittedPlan> uncommitted_;
  std::vector<HeldBlocks> held_;
  mutable ReturningBlocksMemory returning_;  // of BlocksInFlight
  SchedulerCounters counters_;
};

}  // namespace flashquant
