// The events of one request between two threads.
#include "engine/request_stream.h"

#include <utility>

#include "engine/base/make_room.h"
#include "kernels/base/check.h"

namespace flashquant {

RequestStream::RequestStream(std::string request_id, std::shared_ptr<void> user_data,
                             std::shared_ptr<EngineBell> bell)
    : request_id_(std::move(request_id)),
      user_data_(std::move(user_data)),
      bell_(std::move(bell)) {}

StreamUpdate RequestStream::Take() {
  StreamUpdate update;
  {
    MutexLock lock(&mu_);
    update = TakeLocked();
  }
  RingIfMadeRoom(update);
  return update;
}

StreamUpdate RequestStream::WaitAndTake() {
  StreamUpdate update;
  {
    MutexLock lock(&mu_);
    while (update_.empty()) ready_.Wait(&mu_);
    update = TakeLocked();
  }
  RingIfMadeRoom(update);
  return update;
}

StreamUpdate RequestStream::TakeLocked() {
  pending_tokens_.store(0, std::memory_order_relaxed);
  return std::exchange(update_, StreamUpdate{});
}

void RequestStream::RingIfMadeRoom(const StreamUpdate& taken) {
  if (bell_ != nullptr && taken.token_ids.size() >= kMaxPendingTokens) bell_->Ring();
}

void RequestStream::Cancel(CancelReason reason) {
  int none = -1;
  const bool first = cancel_reason_.compare_exchange_strong(none, static_cast<int>(reason));
  if (first && bell_ != nullptr) bell_->Ring();
}

std::optional<CancelReason> RequestStream::cancel_reason() const {
  const int reason = cancel_reason_.load();
  if (reason < 0) return std::nullopt;
  return static_cast<CancelReason>(reason);
}

void RequestStream::PushAdmitted(int64_t cached_prompt_tokens) {
  MutexLock lock(&mu_);
  FQ_CHECK(!finished_);
  update_.admitted = true;
  update_.cached_prompt_tokens = cached_prompt_tokens;
  ready_.NotifyOne();
}

void RequestStream::AddToken(int32_t token_id, TimePoint time,
                             std::optional<OutputLogprobs> logprobs) {
  FQ_CHECK(!finished_);
  MakeRoom(1, &update_.token_ids);
  MakeRoom(1, &update_.token_times);
  if (logprobs.has_value()) MakeRoom(1, &update_.logprobs);
  update_.token_ids.push_back(token_id);
  update_.token_times.push_back(time);
  if (logprobs.has_value()) update_.logprobs.push_back(*std::move(logprobs));
  pending_tokens_.store(static_cast<int>(update_.token_ids.size()), std::memory_order_relaxed);
}

void RequestStream::PushToken(int32_t token_id, TimePoint time,
                              std::optional<OutputLogprobs> logprobs) {
  MutexLock lock(&mu_);
  AddToken(token_id, time, std::move(logprobs));
  ready_.NotifyOne();
}

void RequestStream::PushFinished(FinishedEvent event) {
  MutexLock lock(&mu_);
  FQ_CHECK(!finished_);
  finished_ = true;
  update_.finished = std::move(event);
  ready_.NotifyOne();
}

void RequestStream::FinishIfOpen(const FinishedEvent& event) noexcept {
  MutexLock lock(&mu_);
  if (finished_) return;
  finished_ = true;
  update_.finished = event;
  ready_.NotifyOne();
}

void RequestStream::PushLastToken(int32_t token_id, TimePoint time, FinishedEvent event,
                                  std::optional<OutputLogprobs> logprobs) {
  MutexLock lock(&mu_);
  AddToken(token_id, time, std::move(logprobs));
  finished_ = true;
  update_.finished = std::move(event);
  ready_.NotifyOne();
}

}  // namespace flashquant
