// Engine: checks requests, owns the thread, and decides how it ends. The steps are
// engine_loop.cc's.
#include "engine/engine.h"

#include <atomic>
#include <exception>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "engine/engine_loop.h"
#include "engine/metrics.h"
#include "engine/request_inbox.h"
#include "kernels/base/check.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "prometheus/registry.h"

namespace flashquant {
namespace {

absl::Status DrainingError() {
  return WithReason(UnavailableError("server is shutting down"), "DRAINING");
}

absl::Status EngineFailedError() {
  return WithReason(UnavailableError("engine failed"), "ENGINE_FAILED");
}

absl::Status CheckTokenIds(const GenerateRequest& request, int32_t vocab_size) {
  for (size_t i = 0; i < request.prompt_tokens.size(); ++i) {
    const int32_t id = request.prompt_tokens[i];
    if (id >= 0 && (vocab_size == 0 || id < vocab_size)) continue;
    return WithSubject(
        WithReason(InvalidArgumentError("prompt.token_ids[{}]: out of range (limit {}, got {})", i,
                                        vocab_size, id),
                   "TOKEN_ID_OUT_OF_RANGE"),
        {.field = "prompt.token_ids", .limit = vocab_size, .got = id});
  }
  return absl::OkStatus();
}

// The rules that need the engine's limits; ranges of sampling parameters are the server's. Fills in
// max_output_tokens of a request that is limited by the context alone.
absl::Status CheckRequest(const EngineConfig& config, const EngineDependencies& dependencies,
                          GenerateRequest* request) {
  const auto prompt = static_cast<int64_t>(request->prompt_tokens.size());
  StopConditions& stop = request->stop;
  if (prompt == 0) {
    return WithSubject(
        WithReason(InvalidArgumentError("prompt: must not be empty"), "EMPTY_PROMPT"),
        {.field = "prompt"});
  }
  if (prompt >= config.context_length) {
    return WithSubject(
        WithReason(InvalidArgumentError("prompt: no room for output (context {}, prompt {})",
                                        config.context_length, prompt),
                   "CONTEXT_LENGTH_EXCEEDED"),
        {.field = "prompt", .limit = config.context_length, .got = prompt});
  }
  FQ_RETURN_IF_ERROR(CheckTokenIds(*request, dependencies.vocab_size));
  if (stop.limited_by_context) {
    stop.max_output_tokens = static_cast<int32_t>(config.context_length - prompt);
  }
  if (stop.max_output_tokens < 1) {
    return WithSubject(
        WithReason(InvalidArgumentError("stop.max_output_tokens: must be at least 1"),
                   "PARAMETER_OUT_OF_RANGE"),
        {.field = "stop.max_output_tokens", .limit = 1, .got = stop.max_output_tokens});
  }
  if (prompt + stop.max_output_tokens > config.context_length) {
    const int64_t asked = prompt + stop.max_output_tokens;
    return WithSubject(
        WithReason(
            InvalidArgumentError("prompt + max_output_tokens: exceeds context (limit {}, got {})",
                                 config.context_length, asked),
            "CONTEXT_LENGTH_EXCEEDED"),
        {.field = "stop.max_output_tokens", .limit = config.context_length, .got = asked});
  }
  const int64_t needed =
      Scheduler::BlocksNeeded(prompt, stop.max_output_tokens, config.block_tokens);
  if (needed > config.num_blocks - 1) {
    const int64_t exist = config.num_blocks - 1;
    return WithSubject(
        WithReason(InvalidArgumentError("request needs {} KV blocks, {} exist", needed, exist),
                   "KV_CAPACITY_EXCEEDED"),
        {.field = "stop.max_output_tokens", .limit = exist, .got = needed});
  }
  if (!stop.sequences.empty() && dependencies.tokenizer == nullptr) {
    return WithSubject(
        WithReason(InvalidArgumentError("stop.sequences: the model has no tokenizer"),
                   "STOP_SEQUENCE_INVALID"),
        {.field = "stop.sequences"});
  }
  return absl::OkStatus();
}

}  // namespace

class Engine::Impl {
 public:
  Impl(const EngineConfig& config, EngineDependencies dependencies)
      : config_(config),
        dependencies_(FillIn(std::move(dependencies))),
        inbox_(std::make_shared<RequestInbox>(config.max_waiting)),
        loop_(config_, dependencies_, inbox_.get()),
        thread_([this] { Run(); }) {}

  ~Impl() {
    inbox_->Close(draining_);
    stop_.store(true);
    inbox_->Ring();
    thread_.join();
  }

  absl::StatusOr<std::shared_ptr<RequestStream>> Submit(GenerateRequest request,
                                                        std::shared_ptr<void> user_data) {
    try {
      return SubmitOrThrow(std::move(request), std::move(user_data));
    } catch (const std::bad_alloc&) {
      return no_memory_;
    }
  }

  absl::StatusOr<std::shared_ptr<RequestStream>> SubmitOrThrow(GenerateRequest request,
                                                               std::shared_ptr<void> user_data) {
    FQ_RETURN_IF_ERROR(CheckRequest(config_, dependencies_, &request));
    const TimePoint now = dependencies_.clock->Now();
    if (request.arrival == TimePoint{}) request.arrival = now;
    if (request.deadline.has_value() && now >= *request.deadline) {
      return DeadlineExceededError("deadline exceeded");
    }
    auto stream = std::make_shared<RequestStream>(request.request_id, std::move(user_data), inbox_);
    FQ_RETURN_IF_ERROR(inbox_->Push({std::move(request), stream}));
    return stream;
  }

  void Wake() { inbox_->Ring(); }

  void ResetPrefixCache() {
    reset_prefix_cache_.store(true);
    inbox_->Ring();
  }

  bool Drain(TimePoint deadline) {
    EngineHealth serving = EngineHealth::kServing;
    health_.compare_exchange_strong(serving, EngineHealth::kDraining);
    inbox_->Close(draining_);
    if (inbox_->WaitUntilAllEnded(deadline - dependencies_.clock->Now())) return true;
    end_all_.store(true);
    inbox_->Ring();
    inbox_->WaitUntilAllEnded(std::nullopt);
    return false;
  }

  EngineHealth health() const { return health_.load(); }

  absl::Status failure() const {
    MutexLock lock(&mu_);
    return failure_;
  }

  EngineStats stats() const { return loop_.stats(); }

  EngineProgress progress() const { return {in_step_.load(), turns_.load()}; }

 private:
  EngineDependencies FillIn(EngineDependencies dependencies) {
    if (dependencies.clock == nullptr) dependencies.clock = &own_clock_;
    if (dependencies.metrics == nullptr) {
      own_registry_ = std::make_unique<prometheus::Registry>();
      own_metrics_ = std::make_unique<Metrics>(*own_registry_, "", config_.context_length);
      dependencies.metrics = own_metrics_.get();
    }
    return dependencies;
  }

  // The engine thread.
  void Run() {
    while (!stop_.load()) {
      const absl::StatusOr<bool> more = RunStepWithoutThrowing();
      if (!more.ok()) {
        Fail(more.status());
        return;
      }
      if (end_all_.exchange(false) && !EndAll(draining_, GenerationEnd::kDrained)) {
        Fail(no_memory_in_step_);
        return;
      }
      // The step has taken the bell's ring, perhaps that of the destructor.
      if (!*more && !stop_.load()) inbox_->Wait(loop_.TimeToNextDeadline());
    }
    if (!EndAll(draining_, GenerationEnd::kDrained)) return;
    // Collects what is still in flight: nobody may free the runner under a running step.
    while (RunStepWithoutThrowing().value_or(false)) {
    }
    if (interrupted_) EndAll(draining_, GenerationEnd::kDrained);
  }

  // We do not throw, but the standard library may (out of memory). What an exception interrupted is
  // in no known state, so it ends the engine like a device error. From then on memory may still be
  // short: the way out takes none.
  absl::StatusOr<bool> RunStepWithoutThrowing() {
    in_step_.store(true);
    absl::StatusOr<bool> more = CatchStep();
    ++turns_;
    in_step_.store(false);
    return more;
  }

  absl::StatusOr<bool> CatchStep() {
    try {
      if (reset_prefix_cache_.exchange(false)) loop_.ResetPrefixCache();
      return loop_.RunStep();
    } catch (const std::bad_alloc&) {
      interrupted_ = true;
      return no_memory_in_step_;
    } catch (const std::exception& exception) {
      interrupted_ = true;
      return InternalError("exception in an engine step: {}", exception.what());
    } catch (...) {
      interrupted_ = true;
      return InternalError("exception in an engine step");
    }
  }

  // Ends all requests with `error`; false when an exception, this time or before, left only the
  // way that asks for no state.
  bool EndAll(const absl::Status& error, GenerationEnd end) noexcept {
    try {
      if (!interrupted_) loop_.EndAll(error, end);
    } catch (...) {
      interrupted_ = true;
    }
    if (!interrupted_) return true;
    loop_.Abandon(end == GenerationEnd::kDrained ? drained_event_ : failed_event_);
    return false;
  }

  void Fail(const absl::Status& error) {
    {
      MutexLock lock(&mu_);
      failure_ = error;
    }
    health_.store(EngineHealth::kFailed);
    // Before the requests are ended: none may slip in between.
    inbox_->Close(failed_event_.status);
    EndAll(failed_event_.status, GenerationEnd::kError);
    // Not all were counted on the way without state.
    inbox_->GiveUp();
    if (dependencies_.on_failure) dependencies_.on_failure(error);
  }

  const EngineConfig config_;
  const SteadyClock own_clock_;
  // Made while there is memory; copies of them take none (the reasons are short).
  const absl::Status draining_ = DrainingError();
  const absl::Status no_memory_ = NoMemoryError();
  const absl::Status no_memory_in_step_ = InternalError("out of memory in an engine step");
  const FinishedEvent drained_event_ = ErrorEvent(draining_);
  const FinishedEvent failed_event_ = ErrorEvent(EngineFailedError());
  std::unique_ptr<prometheus::Registry> own_registry_;
  std::unique_ptr<Metrics> own_metrics_;
  const EngineDependencies dependencies_;
  const std::shared_ptr<RequestInbox> inbox_;
  EngineLoop loop_;  // engine thread only, but for stats()

  bool interrupted_ = false;  // engine thread only: an exception came out of loop_
  std::atomic<bool> stop_{false};
  std::atomic<bool> end_all_{false};
  std::atomic<bool> reset_prefix_cache_{false};
  std::atomic<bool> in_step_{false};
  std::atomic<int64_t> turns_{0};
  std::atomic<EngineHealth> health_{EngineHealth::kServing};
  mutable Mutex mu_;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // last: it uses all the others
};

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineConfig& config,
                                                       const EngineDependencies& dependencies) {
  FQ_CHECK(dependencies.runner != nullptr);
  FQ_RETURN_IF_ERROR(config.Validate());
  if (config.context_length < 2) {
    return FailedPreconditionError("context_length: must be at least 2 (got {})",
                                   config.context_length);
  }
  if (config.num_blocks < 2) {
    return FailedPreconditionError("num_blocks: must be at least 2 (got {})", config.num_blocks);
  }
  return std::unique_ptr<Engine>(new Engine(std::make_unique<Impl>(config, dependencies)));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Engine::~Engine() = default;

absl::StatusOr<std::shared_ptr<RequestStream>> Engine::Submit(GenerateRequest request,
                                                              std::shared_ptr<void> user_data) {
  return impl_->Submit(std::move(request), std::move(user_data));
}

void Engine::NotifyCancelled() { impl_->Wake(); }

void Engine::ResetPrefixCache() { impl_->ResetPrefixCache(); }

bool Engine::Drain(TimePoint deadline) { return impl_->Drain(deadline); }

EngineHealth Engine::health() const { return impl_->health(); }

absl::Status Engine::failure() const { return impl_->failure(); }

EngineStats Engine::stats() const { return impl_->stats(); }

EngineProgress Engine::progress() const { return impl_->progress(); }

}  // namespace flashquant
