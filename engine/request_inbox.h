// RequestInbox: the way into the engine thread: a bounded queue of accepted requests, and the bell
// that wakes the thread for anything else (a cancel, room in a stream, a drain).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/clock.h"
#include "engine/request.h"
#include "engine/request_stream.h"
#include "kernels/base/mutex.h"

namespace flashquant {

struct AcceptedRequest {
  GenerateRequest request;
  std::shared_ptr<RequestStream> stream;
};

// Many producers, one consumer (the engine thread). Shared with the streams, which ring the bell
// and may live longer than the engine.
class RequestInbox final : public EngineBell {
 public:
  // `max_waiting`: requests pushed and not yet reported by LeftQueue.
  explicit RequestInbox(int32_t max_waiting) : max_waiting_(max_waiting) {}

  // Any thread, never waits. RESOURCE_EXHAUSTED [QUEUE_FULL], ALREADY_EXISTS
  // [DUPLICATE_REQUEST_ID] when a request of that id has not ended, or the error of Close; nothing
  // is taken then, nor when there is no memory (std::bad_alloc).
  absl::Status Push(AcceptedRequest accepted);
  // Refuses all later pushes with `error` (not OK). The first call decides.
  void Close(absl::Status error);
  // Wakes the consumer. A ring while nobody waits is remembered.
  void Ring() override;

  using Streams = std::unordered_map<std::string, std::shared_ptr<RequestStream>>;  // by id

  // Consumer. What was pushed since the last call.
  std::vector<AcceptedRequest> Take();
  // Consumer, after Close: the streams of all requests that are not forgotten. Empties the queue.
  // Takes no memory.
  Streams TakeAll() noexcept;
  // Waits until something was pushed or the bell rang since the last Take, or, if given, until
  // `timeout` is over.
  void Wait(std::optional<Duration> timeout);
  // One request less in the queue: scheduled for the first time, or ended before that.
  void LeftQueue();
  // The request has ended: its id may be used again. Must come before its terminal event is pushed.
  void Forget(const std::string& request_id);
  // Its terminal event is pushed.
  void Ended();
  // No terminal event follows any more: nobody waits for those that are missing.
  void GiveUp();

  // Waits until all pushed requests have ended; false when `timeout` was over first. Any thread but
  // the consumer.
  bool WaitUntilAllEnded(std::optional<Duration> timeout);

 private:
  const int32_t max_waiting_;
  Mutex mu_;
  CondVar bell_;
  CondVar all_ended_;
  std::vector<AcceptedRequest> queue_ ABSL_GUARDED_BY(mu_);
  bool rung_ ABSL_GUARDED_BY(mu_) = false;
  int32_t num_waiting_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t num_unended_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status closed_ ABSL_GUARDED_BY(mu_);
  Streams open_ ABSL_GUARDED_BY(mu_);
};

}  // namespace flashquant
