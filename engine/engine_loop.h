// EngineLoop: what the engine thread does: one step at a time, from the inbox to the streams. The
// thread itself, and stopping it, are engine.cc's.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/engine.h"
#include "engine/engine_config.h"
#include "engine/fill_wait.h"
#include "engine/metrics.h"
#include "engine/prefill_time.h"
#include "engine/request_inbox.h"
#include "engine/sampling/stop_checker.h"
#include "engine/scheduler/scheduler.h"
#include "engine/step_runner.h"
#include "kernels/base/mutex.h"

namespace flashquant {

// The terminal event of a request that ends with `error` (not OK) and its reason.
FinishedEvent ErrorEvent(absl::Status error);

// Engine thread only, stats() excepted. `inbox`, and what `dependencies` points to, outlive it;
// runner, metrics and clock are set.
class EngineLoop final {
 public:
  EngineLoop(const EngineConfig& config, const EngineDependencies& dependencies,
             RequestInbox* inbox);

  // One step: takes the inbox, ends what is cancelled or expired, schedules, launches, collects,
  // commits, publishes. True when there may be more to do at once, false when there is nothing to
  // do until the inbox wakes us or TimeToNextDeadline passes. An error ends the engine: no further
  // call of the runner.
  absl::StatusOr<bool> RunStep();

  // nullopt: no deadline is pending.
  std::optional<Duration> TimeToNextDeadline() const;

  // Ends every accepted request, the ones in the inbox included, with `error`.
  void EndAll(const absl::Status& error, GenerationEnd end);

  // EndAll for when an exception (memory was short) has interrupted a call and nothing is in a
  // known state: ends every request that has not ended, without looking at any other state and
  // without taking memory if copying `event` takes none. Then waits for the steps in flight. No
  // other call but stats() may follow.
  void Abandon(const FinishedEvent& event) noexcept;

  void ResetPrefixCache() { scheduler_.ClearPrefixCache(); }

  // Snapshot of the last step boundary. Any thread.
  EngineStats stats() const;

 private:
  struct LiveRequest {
    LiveRequest(AcceptedRequest accepted, const EngineDependencies& dependencies);

    GenerateRequest request;  // prompt_tokens has moved to the scheduler
    std::shared_ptr<RequestStream> stream;
    StopChecker stop_checker;
    int64_t num_prompt_tokens = 0;
    std::optional<TimePoint> admitted;
    std::optional<TimePoint> first_token;
    TimePoint last_token{};
  };
  using LiveRequests = std::map<SequenceId, std::unique_ptr<LiveRequest>>;  // by arrival
  // A request that has ended, its terminal event not yet pushed or just being pushed.
  struct EndedRequest {
    std::shared_ptr<RequestStream> stream;
    FinishedEvent event;
    std::optional<CommittedToken> last_token;
    TimePoint last_token_time{};
  };
  struct InFlightStep {
    StepPhase phase = StepPhase::kDecode;
    int32_t num_tokens = 0;
    int32_t num_rows = 0;
    TimePoint launched{};
    Duration launch_time{};
  };

  void TakeInbox();
  // Changes nothing when there is no memory for it.
  void Add(AcceptedRequest accepted);
  void RefuseForMemory(const std::shared_ptr<RequestStream>& stream);
  void EndCancelledAndExpired(TimePoint now);
  void UpdatePauses();
  void AnnounceAdmitted(TimePoint now);
  absl::Status Launch(const StepPlan& plan, TimePoint schedule_begin);
  absl::Status CollectAndCommit();
  void ApplyToken(const CommittedToken& token, TimePoint now, std::set<SequenceId>* touched);
  void CountDiscarded(const std::vector<DiscardedToken>& discarded);

  // The one way in which an accepted request ends. `end`: how its generation counts; nullopt when
  // it was refused before it began. `last_token`: the token that ended it.
  void End(LiveRequests::iterator live, FinishedEvent event, std::optional<GenerationEnd> end,
           ReleaseReason release, std::optional<CommittedToken> last_token = std::nullopt);
  void EndWithError(LiveRequests::iterator live, absl::Status error,
                    std::optional<GenerationEnd> end, ReleaseReason release);
  void FillUsage(const LiveRequest& live, SequenceId id, FinishedEvent* event) const;
  void Notify(const std::shared_ptr<RequestStream>& stream) noexcept;
  void PublishStats(TimePoint now);
  void ReportCounters();
  // Pushes the terminal events. After PublishStats: who has seen the end of a request finds it gone
  // from all counts.
  void PublishEnds();

  const EngineConfig config_;
  const EngineDependencies dependencies_;
  RequestInbox* const inbox_;
  StepRunner* const runner_;
  Metrics* const metrics_;
  const Clock* const clock_;
  const FinishedEvent no_memory_;

  Scheduler scheduler_;
  FillWait fill_wait_;
  PrefillTime prefill_time_;
  std::optional<TimePoint> fill_until_;  // the next step waits for arrivals until then
  SequenceId next_id_ = 0;
  LiveRequests live_;
  std::deque<InFlightStep> in_flight_;
  std::map<SequenceId, TimePoint> awaiting_blocks_;  // cancelled, when seen; blocks not back yet
  SchedulerCounters reported_;                       // what the metrics have seen
  std::deque<EndedRequest> ended_;
  int64_t num_steps_ = 0;

  mutable Mutex mu_;
  EngineStats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace flashquant
