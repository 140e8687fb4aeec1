// From updates of the stream to messages.
#include "server/generate_session.h"

#include <chrono>
#include <utility>

#include "server/status_mapping.h"

namespace flashquant {
namespace {

// A write that takes less is only under way, even where a slow reader is given up "at once".
constexpr Duration kLeastStuck = std::chrono::seconds(1);

}  // namespace

GenerateSession::GenerateSession(CallSink* sink, SessionSettings settings)
    : sink_(sink), settings_(std::move(settings)) {}

void GenerateSession::SetStream(const std::shared_ptr<RequestStream>& stream) {
  std::optional<CancelReason> early;
  {
    MutexLock lock(&mu_);
    cancel_target_ = stream;
    early = early_cancel_;
  }
  if (early) stream->Cancel(*early);
}

void GenerateSession::Cancel(CancelReason reason) {
  std::shared_ptr<RequestStream> target;
  {
    MutexLock lock(&mu_);
    if (!early_cancel_) early_cancel_ = reason;
    target = cancel_target_.lock();
  }
  if (target != nullptr) target->Cancel(reason);
}

void GenerateSession::OnStreamReady(std::shared_ptr<RequestStream> stream, TimePoint now) {
  if (done_) return;
  stream_ = std::move(stream);
  Pump(now);
}

void GenerateSession::OnWriteDone(bool ok, TimePoint now) {
  if (done_) return;
  write_in_flight_ = false;
  paused_since_.reset();
  if (settings_.metrics != nullptr) {
    settings_.metrics->ObserveStreamStall(now - write_started_);
    settings_.metrics->AddPendingMessages(-1);
  }
  if (!ok) {
    broken_ = true;
    Cancel(CancelReason::kClient);
  }
  Pump(now);
}

void GenerateSession::Pump(TimePoint now) {
  if (done_ || write_in_flight_) return;
  // First: while messages wait nothing is taken, and the end may have come during the failed write.
  if (broken_) outbox_.clear();
  if (outbox_.empty() && !ended_) TakeMessages(now);
  // What CheckSlowReader took may make no message (half a character). What came after it must not
  // wait for another note of the stream: there may be none.
  if (outbox_.empty() && !ended_) TakeMessages(now);
  if (broken_) {
    outbox_.clear();
    // The answer may have ended well before the engine saw the cancel.
    if (ended_ && !error_) error_ = ErrorForReason(reason::kCancelled);
  }
  if (outbox_.empty()) {
    if (error_) FinishWith(*error_);
    return;
  }
  v1::GenerateResponse response = std::move(outbox_.front());
  outbox_.pop_front();
  if (response.has_finished()) {
    done_ = true;
    stream_.reset();
    sink_->WriteAndFinish(std::move(response));
    told_ = true;
    return;
  }
  write_in_flight_ = true;
  write_started_ = now;
  if (settings_.metrics != nullptr) settings_.metrics->AddPendingMessages(1);
  sink_->Write(std::move(response));
}

void GenerateSession::TakeMessages(TimePoint now) {
  StreamUpdate update = std::exchange(held_, StreamUpdate{});
  if (update.empty()) update = stream_->Take();
  if (update.admitted) {
    admitted_ = true;
    v1::Accepted* accepted = outbox_.emplace_back().mutable_accepted();
    *accepted = settings_.accepted;
    accepted->set_cached_prompt_tokens(static_cast<uint32_t>(update.cached_prompt_tokens));
  }
  ObserveGaps(update.token_times);
  Gather(update, now);
  if (update.finished || IsDue(now)) SendGathered(now);
  if (update.finished) {
    ended_ = true;
    if (update.finished->status.ok()) {
      *outbox_.emplace_back().mutable_finished() = MakeFinished(*update.finished, settings_.stop);
      ObserveEnd(*update.finished, now);
    } else {
      error_ = ErrorFromFinished(*update.finished);
    }
  }
}

void GenerateSession::Gather(const StreamUpdate& update, TimePoint now) {
  if (num_gathered_ == 0) {
    gathered_.set_first_index(static_cast<uint32_t>(num_tokens_));
    gathered_since_ = update.token_times.empty() ? now : update.token_times.front();
  }
  num_tokens_ += static_cast<int64_t>(update.token_ids.size());
  num_gathered_ += static_cast<int32_t>(update.token_ids.size());
  if (settings_.output.token_ids) {
    gathered_.mutable_token_ids()->Add(update.token_ids.begin(), update.token_ids.end());
  }
  // Room first: a protobuf list that finds none for its new object loses the object.
  auto* list = gathered_.mutable_logprobs();
  list->Reserve(list->size() + static_cast<int>(update.logprobs.size()));
  for (const OutputLogprobs& logprobs : update.logprobs) AddLogprobs(logprobs);
  if (settings_.text == nullptr) return;
  std::string* text = gathered_.mutable_text();
  for (const int32_t id : update.token_ids) text->append(settings_.text->Append(id));
  if (update.finished && update.finished->status.ok()) {
    text->append(settings_.text->Finish(update.finished->text_bytes));
  }
}

bool GenerateSession::IsDue(TimePoint now) const {
  return num_gathered_ >= settings_.output.tokens_per_message ||
         now - gathered_since_ >= kGatherTime;
}

std::optional<TimePoint> GenerateSession::gather_due() const {
  if (done_ || write_in_flight_ || num_gathered_ == 0) return std::nullopt;
  return gathered_since_ + kGatherTime;
}

void GenerateSession::OnGatherDue(TimePoint now) { Pump(now); }

void GenerateSession::SendGathered(TimePoint now) {
  if (num_gathered_ > 0 && !first_handed_over_) {
    first_handed_over_ = true;
    if (settings_.metrics != nullptr) {
      settings_.metrics->ObserveTimeToFirstToken(now - settings_.arrival);
    }
  }
  num_gathered_ = 0;
  v1::Delta delta = std::exchange(gathered_, v1::Delta());
  if (delta.text().empty() && delta.token_ids().empty() && delta.logprobs().empty()) return;
  *outbox_.emplace_back().mutable_delta() = std::move(delta);
}

void GenerateSession::AddLogprobs(const OutputLogprobs& logprobs) {
  v1::Logprob* added = gathered_.add_logprobs();
  *added->mutable_chosen() = ToProto(logprobs.chosen);
  added->mutable_top()->Reserve(static_cast<int>(logprobs.top.size()));
  for (const TokenLogprob& top : logprobs.top) *added->add_top() = ToProto(top);
}

v1::TokenLogprob GenerateSession::ToProto(const TokenLogprob& logprob) const {
  v1::TokenLogprob result;
  result.set_token_id(static_cast<uint32_t>(logprob.token_id));
  result.set_logprob(logprob.logprob);
  if (settings_.tokenizer != nullptr) {
    result.set_token(std::string(settings_.tokenizer->TokenBytes(logprob.token_id)));
  }
  return result;
}

void GenerateSession::ObserveGaps(const std::vector<TimePoint>& token_times) {
  if (settings_.metrics == nullptr) return;
  for (const TimePoint time : token_times) {
    if (last_token_) settings_.metrics->ObserveInterTokenLatency(time - *last_token_);
    last_token_ = time;
  }
}

void GenerateSession::ObserveEnd(const FinishedEvent& event, TimePoint now) {
  if (settings_.metrics == nullptr) return;
  const Duration total = now - settings_.arrival;
  settings_.metrics->ObserveTiming(event.timing, event.usage.output_tokens);
  settings_.metrics->ObserveTimePerOutputToken(total, event.timing.first_token,
                                               event.usage.output_tokens);
  settings_.metrics->ObserveRequestTokens(event.usage.prompt_tokens, event.usage.output_tokens,
                                          settings_.stop.max_output_tokens);
  settings_.metrics->ObserveRequestDuration(total);
}

void GenerateSession::CheckSlowReader(TimePoint now) {
  if (done_ || !write_in_flight_) return;
  const Duration writing = now - write_started_;
  if (stream_->pending_tokens() >= RequestStream::kMaxPendingTokens) {
    if (!paused_since_) paused_since_ = now;
  } else if (writing >= kLeastStuck && writing >= settings_.slow_reader && held_.empty() &&
             !ended_) {
    // Not paused, but stuck: look whether the answer has ended, because nothing will come then.
    held_ = stream_->Take();
  }
  const bool stuck_at_end = writing >= kLeastStuck && (held_.finished.has_value() || ended_);
  if (stuck_at_end && !paused_since_) paused_since_ = write_started_;
  if (!paused_since_ || now - *paused_since_ < settings_.slow_reader) return;
  stream_->Cancel(CancelReason::kSlowReader);
  FinishWith(ErrorForReason(reason::kSlowReader));
}

void GenerateSession::End(const char* reason) {
  if (!done_) FinishWith(ErrorForReason(reason));
}

void GenerateSession::Break() {
  Cancel(CancelReason::kClient);
  if (!told_) FinishWith(ErrorForReason(reason::kInternalError));
}

void GenerateSession::FinishWith(const RequestError& error) {
  // First: once the sink is told, what counts may be gone.
  if (!std::exchange(done_, true)) {
    CountAbort(error);
    if (write_in_flight_ && settings_.metrics != nullptr) settings_.metrics->AddPendingMessages(-1);
  }
  stream_.reset();
  sink_->Finish(error);
  told_ = true;
}

void GenerateSession::CountAbort(const RequestError& error) {
  if (settings_.metrics == nullptr) return;
  if (!admitted_ && error.reason == reason::kQueueTimeout) {
    settings_.metrics->RequestRejected(RejectReason::kQueueTimeout);
  } else if (!admitted_ && error.reason == reason::kQueueFull) {
    settings_.metrics->RequestRejected(RejectReason::kQueueFull);  // no memory for it after all
  } else if (error.reason == reason::kCancelled) {
    settings_.metrics->StreamAborted(StreamAbort::kClientCancel);
  } else if (error.reason == reason::kDeadlineExceeded) {
    settings_.metrics->StreamAborted(StreamAbort::kDeadline);
  } else if (error.reason == reason::kSlowReader) {
    settings_.metrics->StreamAborted(StreamAbort::kSlowReader);
  } else if (error.reason == reason::kDraining) {
    settings_.metrics->StreamAborted(StreamAbort::kDrain);
  }
}

}  // namespace flashquant
