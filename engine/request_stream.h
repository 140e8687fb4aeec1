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
// only note it (link it into a queue), never work, block or take memory. Outlives the engine.
class StreamListener {
 public:
  virtual ~StreamListener() = default;
  virtual void OnStreamReady(const std::shared_ptr<RequestStream>& stream) noexcept = 0;
};

// Everything that happened since the last Take.
struct StreamUpdate {
  bool admitted = false;                  // first scheduling happened (reported once)
  int64_t cached_prompt_tokens = 0;       // with `admitted`: found in the prefix cache
  std::vector<int32_t> token_ids;         // next output tokens
  std::vector<TimePoint> token_times;     // when each was committed, for latency metrics
  std::vector<OutputLogprobs> logprobs;   // of each, when the request asks for them, else empty
  std::optional<FinishedEvent> finished;  // the last update of a stream has it
  bool empty() const { return !admitted && token_ids.empty() && !finished; }
};

// Rung by a stream when the engine has something to see: a cancel, or room again. Any thread.
class EngineBell {
 public:
  virtual ~EngineBell() = default;
  virtual void Ring() = 0;
};

enum class CancelReason { kClient, kDeadline, kSlowReader, kDrain };

class RequestStream final {
 public:
  static constexpr int kMaxPendingTokens = 256;

  // `user_data` is the consumer's own (the server keeps its reactor there). `bell` may be null.
  explicit RequestStream(std::string request_id, std::shared_ptr<void> user_data = nullptr,
                         std::shared_ptr<EngineBell> bell = nullptr);

  const std::string& request_id() const { return request_id_; }
  const std::shared_ptr<void>& user_data() const { return user_data_; }

  // Consumer. Take never waits; WaitAndTake waits until there is something (for callers without a
  // listener); not to be called after the update with `finished`.
  StreamUpdate Take();
  StreamUpdate WaitAndTake();

  // Any thread; the first reason stays. Wakes the engine, which sees it at the next step boundary.
  // Harmless after the end.
  void Cancel(CancelReason reason);
  std::optional<CancelReason> cancel_reason() const;

  // Producer (engine thread) only. A push after Finish is a bug. One that finds no memory
  // (std::bad_alloc) has changed nothing.
  void PushAdmitted(int64_t cached_prompt_tokens = 0);
  void PushToken(int32_t token_id, TimePoint time,
                 std::optional<OutputLogprobs> logprobs = std::nullopt);
  void PushFinished(FinishedEvent event);
  // The token that ends the request and the terminal event, in one update: the consumer must know
  // that it is the last one before it turns it into text.
  void PushLastToken(int32_t token_id, TimePoint time, FinishedEvent event,
                     std::optional<OutputLogprobs> logprobs = std::nullopt);
  // PushFinished, unless it has finished. Takes no memory if copying `event` takes none.
  void FinishIfOpen(const FinishedEvent& event) noexcept;
  // Undelivered tokens; the scheduler pauses the sequence at kMaxPendingTokens.
  int pending_tokens() const { return pending_tokens_.load(std::memory_order_relaxed); }

 private:
  StreamUpdate TakeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AddToken(int32_t token_id, TimePoint time, std::optional<OutputLogprobs> logprobs)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RingIfMadeRoom(const StreamUpdate& taken);

  const std::string request_id_;
  const std::shared_ptr<void> user_data_;
  const std::shared_ptr<EngineBell> bell_;
  std::atomic<int> cancel_reason_{-1};
  std::atomic<int> pending_tokens_{0};

  Mutex mu_;
  CondVar ready_;
  StreamUpdate update_ ABSL_GUARDED_BY(mu_);
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace flashquant
