// GenerateSession: one accepted call between the engine's RequestStream and the RPC that answers
// it: turns tokens into messages, one write in flight, exactly one end.
//
// While a write is in flight nothing is taken from the stream: what comes meanwhile is gathered
// into the next message, and a client that does not read makes the stream fill up, so that the
// engine pauses the sequence. A client may ask for fewer, larger messages: then tokens are gathered
// until there are output.tokens_per_message, but none waits longer than kGatherTime. No gRPC here:
// the RPC is a CallSink. Where memory runs short a call ends alone, see Break.
#pragma once

#include <chrono>
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
// it must not be touched any more: it may be gone. Where one ends with std::bad_alloc, nothing was
// sent.
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
  std::unique_ptr<TextStream> text;      // null when no text is asked for or there is no tokenizer
  const Tokenizer* tokenizer = nullptr;  // for the bytes of logprobs' tokens; may be null
  Duration slow_reader{};                // a reader that stops this long ends the call
  Metrics* metrics = nullptr;            // may be null
};

class GenerateSession;

// What the delivery thread has been told about a session and has not looked at yet. Kept with the
// session, so that telling it takes no memory.
struct DeliveryNotes {
  bool registered = false;
  std::shared_ptr<RequestStream> ready = nullptr;   // it has something to take
  std::optional<bool> write_ok = std::nullopt;      // a write has ended
  bool queued = false;                              // in the thread's queue
  std::shared_ptr<GenerateSession> next = nullptr;  // behind it there
};

class GenerateSession final {
 public:
  // Longest time that a token waits for others to go with, where the client asks for that.
  static constexpr Duration kGatherTime = std::chrono::milliseconds(200);

  GenerateSession(CallSink* sink, SessionSettings settings);
  GenerateSession(const GenerateSession&) = delete;
  GenerateSession& operator=(const GenerateSession&) = delete;

  // Any thread. A cancel before the engine has the request is remembered.
  void SetStream(const std::shared_ptr<RequestStream>& stream);
  void Cancel(CancelReason reason);

  // Delivery thread only.
  void OnStreamReady(std::shared_ptr<RequestStream> stream, TimePoint now);
  void OnWriteDone(bool ok, TimePoint now);
  // When OnGatherDue must be called; unset while no token waits for others, or a write's end will
  // look.
  std::optional<TimePoint> gather_due() const;
  void OnGatherDue(TimePoint now);
  // Ends the call when its client has stopped reading for too long.
  void CheckSlowReader(TimePoint now);
  // Ends the call with the error of `reason`, whatever the engine does.
  void End(const char* reason);
  // After one of these ended with std::bad_alloc: cancels what the engine does and ends the call,
  // if the sink has not been told an end. Can end so too, and be called again.
  void Break();
  TimePoint arrival() const { return settings_.arrival; }  // any thread
  bool write_in_flight() const { return write_in_flight_; }
  bool done() const { return done_; }
  // Lets go of the stream, which holds the session. For the end of the delivery thread.
  void Abandon() { stream_.reset(); }

  DeliveryNotes notes;  // the delivery thread's, under its lock

 private:
  void Pump(TimePoint now);
  void TakeMessages(TimePoint now);
  void Gather(const StreamUpdate& update, TimePoint now);
  // Whether what is gathered must wait no longer.
  bool IsDue(TimePoint now) const;
  // Makes a message of what is gathered, if that is anything.
  void SendGathered(TimePoint now);
  void AddLogprobs(const OutputLogprobs& logprobs);
  v1::TokenLogprob ToProto(const TokenLogprob& logprob) const;
  void ObserveGaps(const std::vector<TimePoint>& token_times);
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
  v1::Delta gathered_;                       // the next message, as far as it is known
  int32_t num_gathered_ = 0;                 // its tokens
  TimePoint gathered_since_{};               // when the first of them was drawn
  std::deque<v1::GenerateResponse> outbox_;  // at most three: Accepted, Delta, Finished
  std::optional<RequestError> error_;        // the end, once the outbox is empty
  bool ended_ = false;                       // the terminal event was taken
  bool broken_ = false;                      // a write failed: the client is gone
  bool done_ = false;                        // the sink is told the end, or just being told
  bool told_ = false;                        // it is
  bool write_in_flight_ = false;
  bool admitted_ = false;
  TimePoint write_started_{};
  std::optional<TimePoint> paused_since_;
  std::optional<TimePoint> last_token_;
  int64_t num_tokens_ = 0;          // taken
  bool first_handed_over_ = false;  // the first token
};

}  // namespace flashquant
