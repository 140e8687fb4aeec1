// One reactor a call on gRPC's own threads; the calling thread only keeps the time.
#include "server/loadtest/load_runner.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "flashquant/v1/inference_service.grpc.pb.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "kernels/base/mutex.h"
#include "server/status_mapping.h"

namespace flashquant {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kProgressInterval{500};

v1::GenerateRequest MakeRequest(const PlannedRequest& planned, float temperature) {
  v1::GenerateRequest request;
  if (planned.token_ids.empty()) {
    request.set_text(planned.text);
  } else {
    request.mutable_token_ids()->mutable_ids()->Add(planned.token_ids.begin(),
                                                    planned.token_ids.end());
  }
  request.mutable_sampling()->set_temperature(temperature);
  request.mutable_stop()->set_max_output_tokens(planned.max_output_tokens);
  // The length is the plan's, not the model's taste.
  request.mutable_stop()->set_ignore_eos(true);
  request.mutable_output()->set_token_ids(true);
  return request;
}

// What calls and the calling thread share.
class Ledger {
 public:
  explicit Ledger(Clock::time_point start) : start_(start) {}

  double Now() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  void Began(grpc::ClientContext* context) {
    const MutexLock lock(&mu_);
    ++progress_.sent;
    ++num_open_;
    cancellable_.insert(context);
  }
  void Tokens(int64_t count) {
    const MutexLock lock(&mu_);
    progress_.output_tokens += count;
  }
  // Before the context goes.
  void Closing(grpc::ClientContext* context) {
    const MutexLock lock(&mu_);
    cancellable_.erase(context);
  }
  void Ended(CallRecord record) {
    const MutexLock lock(&mu_);
    --num_open_;
    ++progress_.ended;
    if (!record.ok) ++progress_.failed;
    if (record.first_token >= 0) progress_.first_tokens.push_back(record.FirstTokenLatency());
    records_.push_back(std::move(record));
    // Under the lock: the waiting thread may destroy this object as soon as it has seen the count.
    changed_.NotifyAll();
  }

  // Waits until fewer than `limit` calls are open or the time has come.
  bool WaitForRoom(size_t limit, double until) {
    const MutexLock lock(&mu_);
    while (num_open_ >= limit) {
      if (Now() >= until) return false;
      changed_.WaitUntil(&mu_, start_ + std::chrono::duration_cast<Clock::duration>(
                                            std::chrono::duration<double>(until)));
    }
    return true;
  }
  void CancelAll() {
    const MutexLock lock(&mu_);
    for (grpc::ClientContext* context : cancellable_) context->TryCancel();
  }
  LoadProgress TakeProgress() {
    const MutexLock lock(&mu_);
    progress_.seconds = Now();
    LoadProgress result = progress_;
    progress_.first_tokens.clear();
    return result;
  }
  std::vector<CallRecord> TakeRecords() {
    const MutexLock lock(&mu_);
    return std::move(records_);
  }

 private:
  const Clock::time_point start_;
  Mutex mu_;
  CondVar changed_;
  size_t num_open_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<grpc::ClientContext*> cancellable_ ABSL_GUARDED_BY(mu_);
  LoadProgress progress_ ABSL_GUARDED_BY(mu_);
  std::vector<CallRecord> records_ ABSL_GUARDED_BY(mu_);
};

// One call; deletes itself when it is over.
class Call final : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  static void Start(v1::InferenceService::Stub* stub, const LoadRunOptions& options,
                    const PlannedRequest& planned, double intended, Ledger* ledger) {
    auto* call = new Call(MakeRequest(planned, options.temperature), intended, ledger);
    if (!options.security.token.empty()) {
      call->context_->AddMetadata("authorization", "Bearer " + options.security.token);
    }
    ledger->Began(&*call->context_);
    stub->async()->Generate(&*call->context_, &call->request_, call);
    call->StartRead(&call->response_);
    call->StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    const double now = ledger_->Now();
    if (response_.has_accepted()) record_.input_tokens = response_.accepted().prompt_tokens();
    if (response_.has_finished()) {
      finished_ = true;
      record_.output_tokens = response_.finished().usage().output_tokens();
    }
    if (response_.has_delta() && response_.delta().token_ids_size() > 0) {
      if (record_.first_token < 0) {
        record_.first_token = now;
      } else {
        record_.gaps.push_back(static_cast<float>(now - last_token_));
      }
      last_token_ = now;
      ledger_->Tokens(response_.delta().token_ids_size());
    }
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    record_.ended = ledger_->Now();
    record_.ok = status.ok() && finished_;
    if (!status.ok()) {
      const CallResult result = ToCallResult(status);
      record_.error = StatusCodeName(result.code);
      if (!result.reason.empty()) record_.error += " " + result.reason;
    } else if (!finished_) {
      record_.error = "stream without its last message";
    }
    // While the channels live: the last reference to one, dropped here on a thread of gRPC's, would
    // end the queue that this thread serves.
    ledger_->Closing(&*context_);
    context_.reset();
    ledger_->Ended(std::move(record_));
    delete this;
  }

 private:
  Call(v1::GenerateRequest request, double intended, Ledger* ledger)
      : request_(std::move(request)), ledger_(ledger) {
    record_.sent = ledger->Now();
    // In a closed loop nobody intended an earlier time.
    record_.intended = intended < 0 ? record_.sent : intended;
  }

  std::optional<grpc::ClientContext> context_{std::in_place};
  const v1::GenerateRequest request_;
  v1::GenerateResponse response_;
  Ledger* const ledger_;
  CallRecord record_;
  double last_token_ = 0;
  bool finished_ = false;
};

// The calling thread's part.
class Run {
 public:
  Run(const LoadRunOptions& options, const std::vector<PlannedRequest>& plan,
      const std::function<bool(const LoadProgress&)>& on_progress)
      : options_(options), plan_(plan), on_progress_(on_progress), ledger_(Clock::now()) {
    for (int i = 0; i < options.connections; ++i) {
      stubs_.push_back(
          v1::InferenceService::NewStub(MakeClientChannel(options.target, options.security)));
    }
  }

  std::vector<CallRecord> Execute() {
    if (options_.concurrency > 0) {
      SendClosed();
    } else {
      SendOpen();
    }
    const double give_up = ledger_.Now() + options_.grace_seconds;
    while (!stopped_ && ledger_.Now() < give_up && !ledger_.WaitForRoom(1, NextReport(give_up))) {
      Report();
    }
    ledger_.CancelAll();
    // Calls hold the ledger: it must not go before the last of them.
    while (!ledger_.WaitForRoom(1, ledger_.Now() + 1)) {
    }
    Report();
    return ledger_.TakeRecords();
  }

 private:
  void SendOpen() {
    for (const PlannedRequest& planned : plan_) {
      while (!stopped_ && ledger_.Now() < planned.seconds) {
        const double until = NextReport(planned.seconds);
        std::this_thread::sleep_for(std::chrono::duration<double>(until - ledger_.Now()));
        Report();
      }
      if (stopped_) return;
      Send(planned, planned.seconds);
    }
  }
  void SendClosed() {
    const auto limit = static_cast<size_t>(options_.concurrency);
    for (size_t i = 0; !stopped_ && ledger_.Now() < options_.duration_seconds;) {
      if (ledger_.WaitForRoom(limit, NextReport(options_.duration_seconds))) {
        Send(plan_[i++ % plan_.size()], -1);
      }
      Report();
    }
  }
  void Send(const PlannedRequest& planned, double intended) {
    Call::Start(stubs_[next_stub_++ % stubs_.size()].get(), options_, planned, intended, &ledger_);
  }
  double NextReport(double latest) const { return std::min(latest, next_report_); }
  void Report() {
    const double now = ledger_.Now();
    if (now < next_report_) return;
    next_report_ = now + std::chrono::duration<double>(kProgressInterval).count();
    if (!on_progress_(ledger_.TakeProgress())) stopped_ = true;
  }

  const LoadRunOptions& options_;
  const std::vector<PlannedRequest>& plan_;
  const std::function<bool(const LoadProgress&)>& on_progress_;
  Ledger ledger_;
  std::vector<std::unique_ptr<v1::InferenceService::Stub>> stubs_;
  size_t next_stub_ = 0;
  double next_report_ = 0;
  bool stopped_ = false;
};

}  // namespace

std::vector<CallRecord> RunLoad(const LoadRunOptions& options,
                                const std::vector<PlannedRequest>& plan,
                                const std::function<bool(const LoadProgress&)>& on_progress) {
  return Run(options, plan, on_progress).Execute();
}

}  // namespace flashquant
