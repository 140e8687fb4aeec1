// The step: inbox, cancels, schedule, launch, collect, commit, publish.
#include "engine/engine_loop.h"

#include <algorithm>
#include <new>
#include <utility>

#include "engine/base/error_reason.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

SchedulerConfig ToSchedulerConfig(const EngineConfig& config) {
  SchedulerConfig result;
  result.max_sequences = config.max_sequences;
  result.token_budget = config.token_budget;
  result.block_tokens = config.block_tokens;
  result.num_blocks = config.num_blocks;
  result.row_multiple = config.row_multiple;
  result.prefix_cache = config.prefix_cache && !config.deterministic;
  result.uniform_steps = config.deterministic;
  result.priority_ageing = std::chrono::milliseconds(config.priority_ageing_ms);
  return result;
}

struct EarlyEnd {
  absl::Status status;
  GenerationEnd end;
  ReleaseReason release;
};

EarlyEnd EndFor(CancelReason reason) {
  switch (reason) {
    case CancelReason::kClient:
      return {CancelledError("cancelled by the client"), GenerationEnd::kCancelled,
              ReleaseReason::kCancelled};
    case CancelReason::kDeadline:
      return {DeadlineExceededError("deadline exceeded"), GenerationEnd::kDeadline,
              ReleaseReason::kDeadline};
    case CancelReason::kSlowReader:
      return {WithReason(ResourceExhaustedError("client does not read"), "SLOW_READER"),
              GenerationEnd::kSlowReader, ReleaseReason::kCancelled};
    case CancelReason::kDrain:
      break;
  }
  return {WithReason(UnavailableError("server is shutting down"), "DRAINING"),
          GenerationEnd::kDrained, ReleaseReason::kCancelled};
}

GenerationEnd ToGenerationEnd(FinishReason reason) {
  static_assert(static_cast<int>(FinishReason::kContextLength) ==
                static_cast<int>(GenerationEnd::kContextLength));
  return static_cast<GenerationEnd>(reason);
}

}  // namespace

FinishedEvent ErrorEvent(absl::Status error) {
  FinishedEvent event;
  event.error_reason = ReasonOf(error);
  event.status = std::move(error);
  return event;
}

EngineLoop::LiveRequest::LiveRequest(AcceptedRequest accepted,
                                     const EngineDependencies& dependencies)
    : request(std::move(accepted.request)),
      stream(std::move(accepted.stream)),
      stop_checker(&request.stop, dependencies.eos_token_ids, dependencies.tokenizer),
      num_prompt_tokens(static_cast<int64_t>(request.prompt_tokens.size())) {}

EngineLoop::EngineLoop(const EngineConfig& config, const EngineDependencies& dependencies,
                       RequestInbox* inbox)
    : config_(config),
      dependencies_(dependencies),
      inbox_(inbox),
      runner_(dependencies.runner),
      metrics_(dependencies.metrics),
      clock_(dependencies.clock),
      no_memory_(ErrorEvent(NoMemoryError())),
      scheduler_(ToSchedulerConfig(config)),
      fill_wait_(DurationFromSeconds(config.fill_wait_ms / 1000),
                 DurationFromSeconds(config.gap_target_ms / 1000)) {
  metrics_->SetQueueLimit(config.max_waiting);
  metrics_->SetRowMultiple(config.row_multiple);
  metrics_->SetKvPool(config.block_tokens);
  PublishStats(clock_->Now());
}

absl::StatusOr<bool> EngineLoop::RunStep() {
  const TimePoint now = clock_->Now();
  TakeInbox();
  EndCancelledAndExpired(now);
  UpdatePauses();
  fill_until_ = fill_wait_.Until(now, in_flight_.empty() ? scheduler_.num_rows_to_fill() : 0);
  if (fill_until_.has_value()) {
    PublishStats(now);
    PublishEnds();
    return false;
  }

  const StepPlan& plan = scheduler_.Schedule();
  const bool launched = !plan.empty();
  if (launched) {
    AnnounceAdmitted(now);
    FQ_RETURN_IF_ERROR(Launch(plan, now));
  }
  // With run-ahead the step just launched stays in flight while the next one is scheduled.
  const bool stays = config_.run_ahead && launched && in_flight_.size() == 1;
  const bool collect = !in_flight_.empty() && !stays;
  if (collect) FQ_RETURN_IF_ERROR(CollectAndCommit());
  PublishStats(now);
  PublishEnds();
  return launched || collect;
}

void EngineLoop::TakeInbox() {
  std::vector<AcceptedRequest> arrived = inbox_->Take();
  if (!arrived.empty()) {
    fill_wait_.Arrived(clock_->Now(), static_cast<int64_t>(arrived.size()));
  }
  for (AcceptedRequest& accepted : arrived) {
    const std::shared_ptr<RequestStream> stream = accepted.stream;
    try {
      Add(std::move(accepted));
    } catch (const std::bad_alloc&) {
      RefuseForMemory(stream);
    }
  }
}

void EngineLoop::Add(AcceptedRequest accepted) {
  const SequenceId id = next_id_++;
  LiveRequests added;  // a map, whose node changes places without taking memory
  added.emplace(id, std::make_unique<LiveRequest>(std::move(accepted), dependencies_));
  GenerateRequest& request = added.at(id)->request;
  scheduler_.Add(id, {.prompt_tokens = std::move(request.prompt_tokens),
                      .sampling = request.sampling,
                      .stop = request.stop,
                      .max_output_tokens = request.stop.max_output_tokens,
                      .priority = request.priority,
                      .cache_salt = request.cache_salt,
                      .arrival = request.arrival,
                      .patience_per_token = DurationFromSeconds(
                          config_.prompt_patience * ToSeconds(prefill_time_.per_token()))});
  live_.merge(added);
}

void EngineLoop::RefuseForMemory(const std::shared_ptr<RequestStream>& stream) {
  inbox_->LeftQueue();
  inbox_->Forget(stream->request_id());
  stream->FinishIfOpen(no_memory_);
  Notify(stream);
  inbox_->Ended();
}

void EngineLoop::EndCancelledAndExpired(TimePoint now) {
  for (auto live = live_.begin(); live != live_.end();) {
    const auto current = live++;  // End erases it
    const LiveRequest& request = *current->second;
    if (const auto reason = request.stream->cancel_reason()) {
      EarlyEnd early = EndFor(*reason);
      EndWithError(current, std::move(early.status), early.end, early.release);
    } else if (request.request.deadline.has_value() && now >= *request.request.deadline) {
      EndWithError(current, DeadlineExceededError("deadline exceeded"), GenerationEnd::kDeadline,
                   ReleaseReason::kDeadline);
    } else if (!request.admitted.has_value() && request.request.queue_deadline.has_value() &&
               now >= *request.request.queue_deadline) {
      EndWithError(current,
                   WithReason(ResourceExhaustedError("queue_timeout: not scheduled in time"),
                              "QUEUE_TIMEOUT"),
                   std::nullopt, ReleaseReason::kDeadline);
    }
  }
}

void EngineLoop::UpdatePauses() {
  for (const auto& [id, live] : live_) {
    if (!live->admitted.has_value()) continue;
    scheduler_.SetPaused(id, live->stream->pending_tokens() >= RequestStream::kMaxPendingTokens);
  }
}

void EngineLoop::AnnounceAdmitted(TimePoint now) {
  for (SequenceId id : scheduler_.admitted()) {
    LiveRequest& live = *live_.at(id);
    live.admitted = now;
    inbox_->LeftQueue();
    live.stream->PushAdmitted(scheduler_.Find(id)->num_cached_prompt_tokens);
    Notify(live.stream);
  }
}

absl::Status EngineLoop::Launch(const StepPlan& plan, TimePoint schedule_begin) {
  InFlightStep step;
  step.phase = plan.phase;
  step.num_tokens = plan.num_tokens;
  step.num_rows = plan.num_rows;
  step.launched = clock_->Now();
  metrics_->AddStageTime(step.phase, StepStage::kSchedule, step.launched - schedule_begin);
  FQ_RETURN_IF_ERROR(Annotate(runner_->Launch(plan), "launch"));
  step.launch_time = clock_->Now() - step.launched;
  in_flight_.push_back(step);
  return absl::OkStatus();
}

absl::Status EngineLoop::CollectAndCommit() {
  const InFlightStep step = in_flight_.front();
  in_flight_.pop_front();
  const TimePoint collect_begin = clock_->Now();
  absl::StatusOr<StepResult> result = runner_->Collect();
  FQ_RETURN_IF_ERROR(Annotate(result.status(), "collect"));
  const TimePoint now = clock_->Now();
  metrics_->StepFinished(step.phase, step.num_tokens, step.num_rows, now - step.launched);
  const StepTimes parts = runner_->last_times();
  metrics_->AddStageTime(step.phase, StepStage::kUpload, parts.upload);
  metrics_->AddStageTime(step.phase, StepStage::kSample, parts.sample);
  metrics_->AddStageTime(step.phase, StepStage::kDownload, parts.download);
  metrics_->AddDeviceTime(step.phase, DeviceStage::kLayers, parts.device_layers);
  metrics_->AddDeviceTime(step.phase, DeviceStage::kHead, parts.device_head);
  metrics_->AddDeviceTime(step.phase, DeviceStage::kSampling, parts.device_sampling);
  metrics_->AddStageTime(
      step.phase, StepStage::kForward,
      step.launch_time + (now - collect_begin) - parts.upload - parts.sample - parts.download);
  ++num_steps_;
  fill_wait_.StepFinished(step.phase, now, now - step.launched);
  prefill_time_.StepFinished(step.phase, step.num_tokens, step.launched, now);

  FQ_ASSIGN_OR_RETURN(const CommitResult committed, scheduler_.Commit(*result));
  std::set<SequenceId> touched;
  for (const CommittedToken& token : committed.tokens) ApplyToken(token, now, &touched);
  for (SequenceId id : touched) {
    const auto live = live_.find(id);
    if (live != live_.end()) Notify(live->second->stream);
  }
  CountDiscarded(committed.discarded);
  for (SequenceId id : committed.blocks_returned) {
    const auto waiting = awaiting_blocks_.find(id);
    if (waiting == awaiting_blocks_.end()) continue;
    metrics_->ObserveCancelToRelease(now - waiting->second);
    awaiting_blocks_.erase(waiting);
  }
  metrics_->AddStageTime(step.phase, StepStage::kDeliver, clock_->Now() - now);
  return absl::OkStatus();
}

void EngineLoop::ApplyToken(const CommittedToken& token, TimePoint now,
                            std::set<SequenceId>* touched) {
  const auto live = live_.find(token.id);
  FQ_CHECK(live != live_.end());
  LiveRequest& request = *live->second;
  if (token.non_finite) {
    metrics_->AddNonFiniteRows(1);
    EndWithError(live,
                 WithReason(InternalError("model produced non-finite values"), "NON_FINITE_LOGITS"),
                 GenerationEnd::kError, ReleaseReason::kError);
    return;
  }
  metrics_->AddOutputTokens(1);
  if (!request.first_token.has_value()) request.first_token = now;
  request.last_token = now;
  const std::optional<StopVerdict> verdict = request.stop_checker.Accept(token.token_id);
  if (!verdict.has_value()) {
    request.stream->PushToken(token.token_id, now, token.logprobs);
    touched->insert(token.id);
    return;
  }
  FinishedEvent event;
  event.reason = verdict->reason;
  event.matched_sequence = verdict->matched_sequence;
  event.matched_token = verdict->matched_token;
  event.text_bytes = verdict->text_bytes;
  End(live, std::move(event), ToGenerationEnd(verdict->reason), ReleaseReason::kFinished, token);
}

void EngineLoop::FillUsage(const LiveRequest& live, SequenceId id, FinishedEvent* event) const {
  Usage& usage = event->usage;
  usage.prompt_tokens = live.num_prompt_tokens;
  usage.output_tokens = live.stop_checker.num_output_tokens();
  if (const Sequence* sequence = scheduler_.Find(id)) {
    usage.cached_prompt_tokens = sequence->num_cached_prompt_tokens;
    usage.recomputed_tokens = sequence->num_recomputed;
    usage.preemptions = sequence->num_preemptions;
  }
  RequestTiming& timing = event->timing;
  if (!live.admitted.has_value()) return;
  timing.queue = *live.admitted - live.request.arrival;
  if (!live.first_token.has_value()) return;
  timing.prefill = *live.first_token - *live.admitted;
  timing.decode = live.last_token - *live.first_token;
  timing.first_token = *live.first_token - live.request.arrival;
}

void EngineLoop::End(LiveRequests::iterator live, FinishedEvent event,
                     std::optional<GenerationEnd> end, ReleaseReason release,
                     std::optional<CommittedToken> last_token) {
  const SequenceId id = live->first;
  const std::unique_ptr<LiveRequest> request = std::move(live->second);
  live_.erase(live);
  FillUsage(*request, id, &event);

  const TimePoint now = clock_->Now();
  const bool held_back = scheduler_.Find(id) != nullptr && !scheduler_.Release(id, release);
  if (release == ReleaseReason::kCancelled && held_back) {
    awaiting_blocks_.emplace(id, now);
  } else if (release == ReleaseReason::kCancelled) {
    metrics_->ObserveCancelToRelease(clock_->Now() - now);
  }
  if (end.has_value()) metrics_->GenerationFinished(*end);

  if (!request->admitted.has_value()) inbox_->LeftQueue();
  ended_.push_back({request->stream, std::move(event), std::move(last_token), request->last_token});
}

void EngineLoop::PublishEnds() {
  for (; !ended_.empty(); ended_.pop_front()) {
    EndedRequest& ended = ended_.front();  // taken out last: Abandon must find it
    // First, so that a client that has seen the end may use the id again.
    inbox_->Forget(ended.stream->request_id());
    if (ended.last_token.has_value()) {
      ended.stream->PushLastToken(ended.last_token->token_id, ended.last_token_time,
                                  std::move(ended.event), std::move(ended.last_token->logprobs));
    } else {
      ended.stream->PushFinished(std::move(ended.event));
    }
    Notify(ended.stream);
    inbox_->Ended();
  }
}

void EngineLoop::EndWithError(LiveRequests::iterator live, absl::Status error,
                              std::optional<GenerationEnd> end, ReleaseReason release) {
  End(live, ErrorEvent(std::move(error)), end, release);
}

void EngineLoop::EndAll(const absl::Status& error, GenerationEnd end) {
  TakeInbox();
  while (!live_.empty()) EndWithError(live_.begin(), error, end, ReleaseReason::kCancelled);
  PublishStats(clock_->Now());
  PublishEnds();
}

void EngineLoop::Abandon(const FinishedEvent& event) noexcept {
  const RequestInbox::Streams open = inbox_->TakeAll();
  {
    EngineStats stats;
    stats.kv_blocks_total = scheduler_.usable_blocks();
    stats.steps = num_steps_;
    MutexLock lock(&mu_);
    stats_ = stats;
  }
  metrics_->SetRequests(0, 0, 0, 0);
  metrics_->SetOldestWaiting(std::nullopt);
  const auto finish = [&](const std::shared_ptr<RequestStream>& stream) {
    stream->FinishIfOpen(event);
    Notify(stream);
  };
  for (const EndedRequest& ended : ended_) finish(ended.stream);
  for (const auto& [id, stream] : open) finish(stream);
  for (; !in_flight_.empty(); in_flight_.pop_front()) {
    try {
      // For the waiting alone: nobody may free the runner under a running step.
      static_cast<void>(runner_->Collect());
    } catch (...) {
    }
  }
}

void EngineLoop::Notify(const std::shared_ptr<RequestStream>& stream) noexcept {
  if (dependencies_.listener != nullptr) dependencies_.listener->OnStreamReady(stream);
}

std::optional<Duration> EngineLoop::TimeToNextDeadline() const {
  std::optional<TimePoint> next;
  const auto consider = [&next](std::optional<TimePoint> deadline) {
    if (deadline.has_value() && (!next.has_value() || *deadline < *next)) next = deadline;
  };
  for (const auto& [id, live] : live_) {
    consider(live->request.deadline);
    if (!live->admitted.has_value()) consider(live->request.queue_deadline);
  }
  consider(fill_until_);
  if (!next.has_value()) return std::nullopt;
  return std::max(Duration::zero(), *next - clock_->Now());
}

}  // namespace flashquant
