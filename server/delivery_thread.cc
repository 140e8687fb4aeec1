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

bool DeliveryThread::WaitForItems(std::vector<Item>* items) {
  MutexLock lock(&mu_);
  while (queue_.empty() && !stop_) {
    if (writing_.empty()) {
      wake_.Wait(&mu_);
    } else if (!wake_.WaitUntil(&mu_, std::chrono::steady_clock::now() + check_interval_)) {
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
  if (item.session->done()) {
    writing_.erase(item.session);
    active_.erase(item.session);
    return;
  }
  if (item.session->write_in_flight()) {
    writing_.insert(item.session);
  } else {
    writing_.erase(item.session);
  }
  active_.insert(std::move(item.session));
}

void DeliveryThread::HandleEndAll(const char* reason) {
  ended_with_ = reason;
  for (const auto& session : active_) session->End(reason);
  active_.clear();
  writing_.clear();
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
    if (const TimePoint now = clock_->Now(); now >= next_check) {
      CheckSlowReaders();
      next_check = now + check_interval_;
    }
  }
}

}  // namespace flashquant
