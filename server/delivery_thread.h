// DeliveryThread: takes the streams that have something to say and lets their sessions write.
//
// One thread for all calls: it detokenises and starts writes, so that neither the engine thread nor
// gRPC's few callback threads do. It never waits for a client. The queue is a list through the
// sessions with notes that it has not looked at: bounded by the number of calls, and no note takes
// memory. A call for which memory runs short ends alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>

#include "engine/base/clock.h"
#include "engine/request_stream.h"
#include "kernels/base/mutex.h"
#include "server/generate_session.h"

namespace flashquant {

class DeliveryThread final : public StreamListener {
 public:
  // `slow_reader`: how often to look for stalled writes follows from it.
  DeliveryThread(const Clock* clock, Duration slow_reader);
  // Stops at once; calls that have not ended are not told. To be destroyed after the engine and
  // after every RPC is done.
  ~DeliveryThread() override;

  // Engine thread. The stream's user_data is a GenerateSession.
  void OnStreamReady(const std::shared_ptr<RequestStream>& stream) noexcept override;
  // Any thread: the write that the session's sink started has ended.
  void OnWriteDone(const std::shared_ptr<GenerateSession>& session, bool ok) noexcept;
  // Any thread: a session that the engine has accepted. Known from now on, also to EndAll, although
  // the engine may never say anything about it.
  void Register(const std::shared_ptr<GenerateSession>& session) noexcept;
  // Any thread: ends every registered session with the error of `reason`, for an engine that is
  // stuck and cannot do it.
  void EndAll(const char* reason) noexcept;

 private:
  void Queue(const std::shared_ptr<GenerateSession>& session) noexcept
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The first session of the queue and what its notes were; null when there is none.
  std::shared_ptr<GenerateSession> Take(DeliveryNotes* notes) noexcept;
  void Run();
  // False when the thread must stop.
  bool WaitForNotes();
  void HandleQueued();
  void Handle(const std::shared_ptr<GenerateSession>& session, DeliveryNotes notes);
  // Runs `action`; where it finds no memory, `session` ends.
  template <typename Action>
  void OrBreak(const std::shared_ptr<GenerateSession>& session, Action action);
  void HandleEndAll(const char* reason);
  void CheckSlowReaders();
  // Notes what the session waits for now.
  void Track(const std::shared_ptr<GenerateSession>& session);
  void Untrack(const std::shared_ptr<GenerateSession>& session);
  void SendWhatIsDue(TimePoint now);
  // When there is something to do although nothing happens; unset = never.
  std::optional<std::chrono::steady_clock::time_point> NextLook() const;

  const Clock* const clock_;
  const Duration check_interval_;

  Mutex mu_;
  CondVar wake_;
  std::shared_ptr<GenerateSession> first_ ABSL_GUARDED_BY(mu_);  // of the queue
  GenerateSession* last_ ABSL_GUARDED_BY(mu_) = nullptr;
  int64_t num_queued_ ABSL_GUARDED_BY(mu_) = 0;
  const char* end_all_ ABSL_GUARDED_BY(mu_) = nullptr;  // not looked at yet
  bool stop_ ABSL_GUARDED_BY(mu_) = false;

  // Delivery thread only: the sessions that are not done, those with a write in flight, and those
  // with tokens that wait for others, until when.
  std::set<std::shared_ptr<GenerateSession>> active_;
  std::set<std::shared_ptr<GenerateSession>> writing_;
  std::map<std::shared_ptr<GenerateSession>, TimePoint> gathering_;
  const char* ended_with_ = nullptr;  // after EndAll: what comes late ends at once

  std::thread thread_;
};

}  // namespace flashquant
