// The queue and the loop.
#include "server/delivery_thread.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace flashquant {
namespace {

constexpr Duration kShortestCheck = std::chrono::milliseconds(10);
constexpr Duration kLongestCheck = std::chrono::seconds(1);

}  // namespace

DeliveryThread::DeliveryThread(const Clock* clock, Duration slow_reader)
    : clock_(clock),
      check_interval_(std::clamp<Duration>(slow_reader / 4, kShortestCheck, kLongestCheck)),
      thread_([this] { Run(); }) {}

DeliveryThread::~DeliveryThread() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    wake_.NotifyOne();
  }
  thread_.join();
  for (const auto& session : active_) session->Abandon();
}

void DeliveryThread::Push(Item item) {
  MutexLock lock(&mu_);
  queue_.push_back(std::move(item));
  wake_.NotifyOne();
}

void DeliveryThread::OnStreamReady(const std::shared_ptr<RequestStream>& stream) {
  auto session = std::static_pointer_cast<GenerateSession>(stream->user_data());
  if (session->queued.exchange(true)) return;
  Push({.what = What::kStreamReady, .session = std::move(session), .stream = stream});
}

void DeliveryThread::OnWriteDone(std::shared_ptr<GenerateSession> session, bool ok) {
  Push({.what = What::kWriteDone, .session = std::move(session), .write_ok = ok});
}

void DeliveryThread::Register(std::shared_ptr<GenerateSession> session) {
  Push({.what = What::kRegistered, .session = std::move(session)});
}

void DeliveryThread::EndAll(const char* reason) {
  Push({.what = What::kEndAll, .session = nullptr, .reason = reason});
}

std::optional<std::chrono::steady_clock::time_point> DeliveryThread::NextLook() const {
  std::optional<Duration> wait;
  if (!writing_.empty()) wait = check_interval_;
  const TimePoint now = clock_->Now();
  for (const auto& [session, due] : gathering_) {
    if (!wait || due - now < *wait) wait = due - now;
  }
  if (!wait) return std::nullopt;
  return std::chrono::steady_clock::now() + *wait;
}

bool DeliveryThread::WaitForItems(std::vector<Item>* items) {
  const auto next_look = NextLook();
  MutexLock lock(&mu_);
  while (queue_.empty() && !stop_) {
    if (!next_look) {
      wake_.Wait(&mu_);
    } else if (!wake_.WaitUntil(&mu_, *next_look)) {
      break;
    }
  }
  items->clear();
  std::swap(*items, queue_);
  return !stop_;
}

void DeliveryThread::Handle(Item item) {
  if (item.what == What::kEndAll) {
    HandleEndAll(item.reason);
    return;
  }
  const TimePoint now = clock_->Now();
  if (item.what == What::kStreamReady) {
    // Before anything is taken: what comes from now on queues the stream again.
    item.session->queued.store(false);
    item.session->OnStreamReady(std::move(item.stream), now);
  } else if (item.what == What::kWriteDone) {
    item.session->OnWriteDone(item.write_ok, now);
  } else if (ended_with_ != nullptr) {
    item.session->End(ended_with_);
  }
  Track(std::move(item.session));
}

void DeliveryThread::Track(std::shared_ptr<GenerateSession> session) {
  if (session->write_in_flight() && !session->done()) {
    writing_.insert(session);
  } else {
    writing_.erase(session);
  }
  if (const std::optional<TimePoint> due = session->gather_due()) {
    gathering_.insert_or_assign(session, *due);
  } else {
    gathering_.erase(session);
  }
  if (session->done()) {
    active_.erase(session);
  } else {
    active_.insert(std::move(session));
  }
}

void DeliveryThread::SendWhatIsDue(TimePoint now) {
  std::vector<std::shared_ptr<GenerateSession>> due_now;
  for (const auto& [session, due] : gathering_) {
    if (due <= now) due_now.push_back(session);
  }
  for (auto& session : due_now) {
    session->OnGatherDue(now);
    Track(std::move(session));
  }
}

void DeliveryThread::HandleEndAll(const char* reason) {
  ended_with_ = reason;
  for (const auto& session : active_) session->End(reason);
  active_.clear();
  writing_.clear();
  gathering_.clear();
}

void DeliveryThread::CheckSlowReaders() {
  const TimePoint now = clock_->Now();
  std::erase_if(writing_, [&](const std::shared_ptr<GenerateSession>& session) {
    session->CheckSlowReader(now);
    if (!session->done()) return false;
    active_.erase(session);
    return true;
  });
}

void DeliveryThread::Run() {
  std::vector<Item> items;
  TimePoint next_check = clock_->Now() + check_interval_;
  while (WaitForItems(&items)) {
    for (Item& item : items) Handle(std::move(item));
    SendWhatIsDue(clock_->Now());
    if (const TimePoint now = clock_->Now(); now >= next_check) {
      CheckSlowReaders();
      next_check = now + check_interval_;
    }
  }
}

}  // namespace flashquant
