// The bounded queue into the engine thread.
#include "engine/request_inbox.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/base/error_reason.h"
#include "engine/base/make_room.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// Waits always use the real clock: a fake one does not make time pass. The cap keeps the sum from
// overflowing; nobody waits for a year.
TimePoint WaitEnd(std::optional<Duration> timeout) {
  constexpr Duration kLongest = std::chrono::hours(24 * 365);
  return std::chrono::steady_clock::now() + std::min(timeout.value_or(kLongest), kLongest);
}

}  // namespace

absl::Status RequestInbox::Push(AcceptedRequest accepted) {
  {
    MutexLock lock(&mu_);
    if (!closed_.ok()) return closed_;
    if (open_.contains(accepted.request.request_id)) {
      return WithSubject(
          WithReason(AlreadyExistsError("request_id: already running"), "DUPLICATE_REQUEST_ID"),
          {.field = "request_id"});
    }
    if (num_waiting_ >= max_waiting_) {
      return WithSubject(
          WithReason(ResourceExhaustedError("queue full (limit {})", max_waiting_), "QUEUE_FULL"),
          {.limit = max_waiting_});
    }
    MakeRoom(1, &queue_);
    open_.emplace(accepted.request.request_id, accepted.stream);
    ++num_waiting_;
    ++num_unended_;
    queue_.push_back(std::move(accepted));
  }
  bell_.NotifyOne();
  return absl::OkStatus();
}

void RequestInbox::Close(absl::Status error) {
  FQ_CHECK(!error.ok());
  MutexLock lock(&mu_);
  if (closed_.ok()) closed_ = std::move(error);
}

void RequestInbox::Ring() {
  {
    MutexLock lock(&mu_);
    rung_ = true;
  }
  bell_.NotifyOne();
}

std::vector<AcceptedRequest> RequestInbox::Take() {
  MutexLock lock(&mu_);
  rung_ = false;
  return std::exchange(queue_, {});
}

RequestInbox::Streams RequestInbox::TakeAll() noexcept {
  std::vector<AcceptedRequest> dropped;  // outlives the lock: their streams hold this inbox
  MutexLock lock(&mu_);
  std::swap(dropped, queue_);
  return std::exchange(open_, {});
}

void RequestInbox::Wait(std::optional<Duration> timeout) {
  const TimePoint until = WaitEnd(timeout);
  MutexLock lock(&mu_);
  while (queue_.empty() && !rung_) {
    if (!timeout.has_value()) {
      bell_.Wait(&mu_);
    } else if (!bell_.WaitUntil(&mu_, until)) {
      return;
    }
  }
}

void RequestInbox::LeftQueue() {
  MutexLock lock(&mu_);
  FQ_CHECK(num_waiting_ > 0);
  --num_waiting_;
}

void RequestInbox::Forget(const std::string& request_id) {
  MutexLock lock(&mu_);
  FQ_CHECK(open_.erase(request_id) == 1);
}

void RequestInbox::Ended() {
  MutexLock lock(&mu_);
  FQ_CHECK(num_unended_ > 0);
  if (--num_unended_ == 0) all_ended_.NotifyAll();
}

void RequestInbox::GiveUp() {
  MutexLock lock(&mu_);
  num_unended_ = 0;
  all_ended_.NotifyAll();
}

bool RequestInbox::WaitUntilAllEnded(std::optional<Duration> timeout) {
  const TimePoint until = WaitEnd(timeout);
  MutexLock lock(&mu_);
  while (num_unended_ > 0) {
    if (!timeout.has_value()) {
      all_ended_.Wait(&mu_);
    } else if (!all_ended_.WaitUntil(&mu_, until)) {
      return num_unended_ == 0;
    }
  }
  return true;
}

}  // namespace flashquant
