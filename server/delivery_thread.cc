// The queue and the loop.
#include "server/delivery_thread.h"

#include <algorithm>
#include <chrono>
#include <new>
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
  DeliveryNotes dropped;
  while (Take(&dropped) != nullptr) {
  }
  for (const auto& session : active_) session->Abandon();
}

void DeliveryThread::Queue(const std::shared_ptr<GenerateSession>& session) noexcept {
  if (std::exchange(session->notes.queued, true)) return;
  if (last_ == nullptr) {
    first_ = session;
  } else {
    last_->notes.next = session;
  }
  last_ = session.get();
  ++num_queued_;
  wake_.NotifyOne();
}

std::shared_ptr<GenerateSession> DeliveryThread::Take(DeliveryNotes* notes) noexcept {
  MutexLock lock(&mu_);
  const std::shared_ptr<GenerateSession> session = std::move(first_);
  if (session == nullptr) return nullptr;
  // From now on it can be queued again.
  *notes = std::exchange(session->notes, DeliveryNotes());
  first_ = std::move(notes->next);
  if (first_ == nullptr) last_ = nullptr;
  --num_queued_;
  return session;
}

void DeliveryThread::OnStreamReady(const std::shared_ptr<RequestStream>& stream) noexcept {
  const auto session = std::static_pointer_cast<GenerateSession>(stream->user_data());
  MutexLock lock(&mu_);
  session->notes.ready = stream;
  Queue(session);
}

void DeliveryThread::OnWriteDone(const std::shared_ptr<GenerateSession>& session,
                                 bool ok) noexcept {
  MutexLock lock(&mu_);
  session->notes.write_ok = ok;
  Queue(session);
}

void DeliveryThread::Register(const std::shared_ptr<GenerateSession>& session) noexcept {
  MutexLock lock(&mu_);
  session->notes.registered = true;
  Queue(session);
}

void DeliveryThread::EndAll(const char* reason) noexcept {
  MutexLock lock(&mu_);
  end_all_ = reason;
  wake_.NotifyOne();
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

bool DeliveryThread::WaitForNotes() {
  const auto next_look = NextLook();
  MutexLock lock(&mu_);
  while (first_ == nullptr && end_all_ == nullptr && !stop_) {
    if (!next_look) {
      wake_.Wait(&mu_);
    } else if (!wake_.WaitUntil(&mu_, *next_look)) {
      break;
    }
  }
  return !stop_;
}

// What is queued meanwhile waits until the clock has been looked at.
void DeliveryThread::HandleQueued() {
  int64_t count = 0;
  const char* end_all = nullptr;
  {
    MutexLock lock(&mu_);
    count = num_queued_;
    end_all = std::exchange(end_all_, nullptr);
  }
  for (; count > 0; --count) {
    DeliveryNotes notes;
    const std::shared_ptr<GenerateSession> session = Take(&notes);
    OrBreak(session, [&] { Handle(session, std::move(notes)); });
  }
  if (end_all != nullptr) HandleEndAll(end_all);
}

template <typename Action>
void DeliveryThread::OrBreak(const std::shared_ptr<GenerateSession>& session, Action action) {
  try {
    action();
  } catch (const std::bad_alloc&) {
    // Where even this finds no memory the process ends: nobody else could end the call.
    session->Break();
    Untrack(session);
  }
}

void DeliveryThread::Handle(const std::shared_ptr<GenerateSession>& session, DeliveryNotes notes) {
  const TimePoint now = clock_->Now();
  if (notes.registered && ended_with_ != nullptr) session->End(ended_with_);
  if (notes.write_ok.has_value()) session->OnWriteDone(*notes.write_ok, now);
  if (notes.ready != nullptr) session->OnStreamReady(std::move(notes.ready), now);
  Track(session);
}

void DeliveryThread::Track(const std::shared_ptr<GenerateSession>& session) {
  if (session->done()) {
    Untrack(session);
    return;
  }
  active_.insert(session);
  if (session->write_in_flight()) {
    writing_.insert(session);
  } else {
    writing_.erase(session);
  }
  if (const std::optional<TimePoint> due = session->gather_due()) {
    gathering_.insert_or_assign(session, *due);
  } else {
    gathering_.erase(session);
  }
}

void DeliveryThread::Untrack(const std::shared_ptr<GenerateSession>& session) {
  writing_.erase(session);
  gathering_.erase(session);
  active_.erase(session);
}

void DeliveryThread::SendWhatIsDue(TimePoint now) {
  // What is sent leaves the list, or is due later.
  for (auto next = gathering_.begin(); next != gathering_.end();) {
    const std::shared_ptr<GenerateSession> session = next->first;
    const TimePoint due = next++->second;
    if (due > now) continue;
    OrBreak(session, [&] {
      session->OnGatherDue(now);
      Track(session);
    });
  }
}

void DeliveryThread::HandleEndAll(const char* reason) {
  ended_with_ = reason;
  while (!active_.empty()) {
    const std::shared_ptr<GenerateSession> session = *active_.begin();
    OrBreak(session, [&] { session->End(reason); });
    active_.erase(session);
  }
  writing_.clear();
  gathering_.clear();
}

void DeliveryThread::CheckSlowReaders() {
  const TimePoint now = clock_->Now();
  for (auto next = writing_.begin(); next != writing_.end();) {
    const std::shared_ptr<GenerateSession> session = *next++;
    OrBreak(session, [&] { session->CheckSlowReader(now); });
    if (session->done()) Untrack(session);
  }
}

void DeliveryThread::Run() {
  TimePoint next_check = clock_->Now() + check_interval_;
  while (WaitForNotes()) {
    HandleQueued();
    SendWhatIsDue(clock_->Now());
    if (const TimePoint now = clock_->Now(); now >= next_check) {
      CheckSlowReaders();
      next_check = now + check_interval_;
    }
  }
}

}  // namespace flashquant
