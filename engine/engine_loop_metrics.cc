// What a step leaves in the metrics and in the snapshot of the counts.
#include <optional>
#include <vector>

#include "engine/engine_loop.h"

namespace flashquant {

void EngineLoop::CountDiscarded(const std::vector<DiscardedToken>& discarded) {
  for (const DiscardedToken& token : discarded) {
    switch (token.reason) {
      case ReleaseReason::kFinished:
      case ReleaseReason::kError:
        metrics_->AddDiscardedTokens(DiscardReason::kPastStop, 1);
        break;
      case ReleaseReason::kCancelled:
        metrics_->AddDiscardedTokens(DiscardReason::kCancelled, 1);
        break;
      case ReleaseReason::kDeadline:
        metrics_->AddDiscardedTokens(DiscardReason::kDeadline, 1);
        break;
    }
  }
}

void EngineLoop::PublishStats(TimePoint now) {
  EngineStats stats;
  stats.requests_waiting = scheduler_.num_waiting();
  stats.requests_paused = scheduler_.num_paused();
  stats.requests_running = scheduler_.num_running() - stats.requests_paused;
  stats.requests_preempted = scheduler_.num_preempted();
  stats.kv_blocks_total = scheduler_.usable_blocks();
  stats.kv_blocks_used = scheduler_.blocks_used();
  stats.kv_blocks_cached = scheduler_.blocks_cached();
  stats.kv_blocks_unaccounted = scheduler_.blocks_unaccounted();
  stats.steps = num_steps_;
  {
    MutexLock lock(&mu_);
    stats_ = stats;
  }

  metrics_->SetRequests(stats.requests_waiting, stats.requests_running, stats.requests_preempted,
                        stats.requests_paused);
  std::optional<Duration> oldest_age;
  if (const auto oldest = scheduler_.oldest_waiting()) {
    oldest_age = now - live_.at(*oldest)->request.arrival;
  }
  metrics_->SetOldestWaiting(oldest_age);
  metrics_->SetKvBlocks(stats.kv_blocks_used, stats.kv_blocks_cached,
                        stats.kv_blocks_total - stats.kv_blocks_used - stats.kv_blocks_cached,
                        stats.kv_blocks_unaccounted);
  ReportCounters();
}

void EngineLoop::ReportCounters() {
  const SchedulerCounters counters = scheduler_.counters();
  metrics_->AddInputTokens(InputTokens::kComputed,
                           counters.prompt_tokens_computed - reported_.prompt_tokens_computed);
  metrics_->AddInputTokens(InputTokens::kCached,
                           counters.prompt_tokens_cached - reported_.prompt_tokens_cached);
  metrics_->AddInputTokens(InputTokens::kRecomputed,
                           counters.tokens_recomputed - reported_.tokens_recomputed);
  metrics_->AddPreemptions(PreemptionCause::kKvPressure,
                           counters.preemptions_for_blocks - reported_.preemptions_for_blocks);
  metrics_->AddPreemptions(PreemptionCause::kPriority,
                           counters.preemptions_for_priority - reported_.preemptions_for_priority);
  metrics_->AddPrefixCacheLookup(counters.cache_hit_tokens - reported_.cache_hit_tokens,
                                 counters.cache_miss_tokens - reported_.cache_miss_tokens);
  metrics_->AddKvAllocationFailures(counters.allocation_failures - reported_.allocation_failures);
  reported_ = counters;
}

EngineStats EngineLoop::stats() const {
  MutexLock lock(&mu_);
  return stats_;
}

}  // namespace flashquant
