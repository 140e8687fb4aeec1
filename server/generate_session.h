// GenerateSession: one accepted call between the engine's RequestStream and the RPC that answers
// it: turns tokens into messages, one write in flight, exactly one end.
//
// While a write is in flight nothing is taken from the stream: what comes meanwhile is gathered
// into the next message, and a client that does not read makes the stream fill up, so that the
// engine pauses the sequence. No gRPC here: the RPC is a CallSink.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>

#include "engine/base/clock.h"
#include "engine/metrics.h"
#include "engine/request.h"
#include "engine/request_stream.h"
#include "engine/tokenizer/text_stream.h"
#include "flashquant/v1/inference.pb.h"
#include "kernels/base/mutex.h"
#include "server/request_error.h"
#include "server/request_mapping.h"

namespace flashquant {

// The RPC. Called on the delivery thread only, with no lock held. After WriteAndFinish or Finish
// it must not be touched any more: it may be gone.
class CallSink {
 public:
  virtual ~CallSink() = default;
  // Starts sending. DeliveryThread::OnWriteDone must follow, from any thread.
  virtual void Write(v1::GenerateResponse response) = 0;
  // Sends the last message and ends with OK.
  virtual void WriteAndFinish(v1::GenerateResponse response) = 0;
  // Ends with an error; a write may still be in flight.
  virtual void Finish(const RequestError& error) = 0;
};

struct SessionSettings {
  v1::Accepted accepted;
  StopConditions stop;
  OutputSettings output;
  TimePoint arrival{};
  std::unique_ptr<TextStream> text;  // null when no text is asked for or there is no tokenizer
  Duration slow_reader{};            // a reader that stops this long ends the call
  Metrics* metrics = nullptr;        // may be null
};

class GenerateSession final {
 public:
  GenerateSession(CallSink* sink, SessionSettings settings);
  GenerateSession(const GenerateSession&) = delete;
  GenerateSession& operator=(const GenerateSession&) = delete;

  // Any thread. A cancel before the engine has the request is remembered.
  void SetStream(const std::shared_ptr<RequestStream>& stream);
  void Cancel(CancelReason reason);

  // Delivery thread only.
  void OnStreamReady(std::shared_ptr<RequestStream> stream, TimePoint now);
  void OnWriteDone(bool ok, TimePoint now);
  // Ends the call when its client has stopped reading for too long.
  void CheckSlowReader(TimePoint now);
  // Ends the call with the error of `reason`, whatever the engine does.
  void End(const char* reason);
  TimePoint arrival() const { return settings_.arrival; }  // any thread
  bool write_in_flight() const { return write_in_flight_; }
  bool done() const { return done_; }
  // Lets go of the stream, which holds the session. For the end of the delivery thread.
  void Abandon() { stream_.reset(); }

  // Whether the stream is already in the delivery thread's queue.
  std::atomic<bool> queued{false};

 private:
  void Pump(TimePoint now);
  void TakeMessages(TimePoint now);
  void AddDelta(const std::vector<int32_t>& token_ids,
                const std::optional<FinishedEvent>& finished);
  void ObserveTokens(const StreamUpdate& update, TimePoint now);
  void ObserveEnd(const FinishedEvent& event, TimePoint now);
  void FinishWith(const RequestError& error);
  void CountAbort(const RequestError& error);

  CallSink* const sink_;
  const SessionSettings settings_;

  Mutex mu_;
  std::weak_ptr<RequestStream> cancel_target_ ABSL_GUARDED_BY(mu_);
  std::optional<CancelReason> early_cancel_ ABSL_GUARDED_BY(mu_);

  // Delivery thread only.
  std::shared_ptr<RequestStream> stream_;
  StreamUpdate held_;                        // taken early, see CheckSlowReader
  std::deque<v1::GenerateResponse> outbox_;  // at most three: Accepted, Delta, Finished
  std::optional<RequestError> error_;        // the end, once the outbox is empty
  bool ended_ = false;                       // the terminal event was taken
  bool broken_ = false;                      // a write failed: the client is gone
  bool done_ = false;                        // the sink was told the end
  bool write_in_flight_ = false;
  bool admitted_ = false;
  TimePoint write_started_{};
  std::optional<TimePoint> paused_since_;
  std::optional<TimePoint> last_token_;
  int64_t num_tokens_ = 0;
};

}  // namespace flashquant
