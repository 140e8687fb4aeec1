// RequestStream: the events of one request, from the engine thread to whoever delivers them, and
// the cancel flag the other way.
//
// One producer (engine thread), one consumer (delivery thread, or the caller of `complete`). It
// holds at most kMaxPendingTokens undelivered tokens plus one step and the terminal event: at the
// limit the scheduler pauses the sequence, so a push can neither fail nor block.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "kernels/base/mutex.h"

namespace flashquant {

class RequestStream;

// Told, on the engine thread and without any lock held, that a stream has something to take. Must
// only note it (push to a queue), never work or block. Outlives the engine.
class StreamListener {
 public:
  virtual ~StreamListener() = default;
  virtual void OnStreamReady(const std::shared_ptr<RequestStream>& stream) = 0;
};

// Everything that happened since the last Take.
struct StreamUpdate {
  bool admitted = false;                  // first scheduling happened (reported once)
  std::vector<int32_t> token_ids;         // next output tokens
  std::vector<TimePoint> token_times;     // when each was committed, for latency metrics
  std::optional<FinishedEvent> finished;  // the last update of a stream has it
  bool empty() const { return !admitted && token_ids.empty() && !finished; }
};

enum class CancelReason { kClient, kDeadline, kSlowReader, kDrain };

class RequestStream final {
 public:
  static constexpr int kMaxPendingTokens = 256;

  // `user_data` is the consumer's own (the server keeps its reactor there).
  explicit RequestStream(std::string request_id, std::shared_ptr<void> user_data = nullptr);

  const std::string& request_id() const { return request_id_; }
  const std::shared_ptr<void>& user_data() const { return user_data_; }

  // Consumer. Take never waits; WaitAndTake waits until there is something (for callers without a
  // listener).
  StreamUpdate Take();
  StreamUpdate WaitAndTake();

  // Any thread; the first reason stays. Seen by the engine at the next step boundary.
  void Cancel(CancelReason reason);
  std::optional<CancelReason> cancel_reason() const;

  // Producer (engine thread) only. A push after Finish is a bug.
  void PushAdmitted();
  void PushToken(int32_t token_id, TimePoint time);
  void PushFinished(FinishedEvent event);
  // Undelivered tokens; the scheduler pauses the sequence at kMaxPendingTokens.
  int pending_tokens() const { return pending_tokens_.load(std::memory_order_relaxed); }

 private:
  const std::string request_id_;
  const std::shared_ptr<void> user_data_;
  std::atomic<int> cancel_reason_{-1};
  std::atomic<int> pending_tokens_{0};

  Mutex mu_;
  CondVar ready_;
  StreamUpdate update_ ABSL_GUARDED_BY(mu_);
};

}  // namespace flashquant
