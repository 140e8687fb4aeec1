// DeliveryThread: takes the streams that have something to say and lets their sessions write.
//
// One thread for all calls: it detokenises and starts writes, so that neither the engine thread nor
// gRPC's few callback threads do. It never waits for a client. The queue is bounded by the number
// of calls: a stream is in it at most once, beside one finished write.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <vector>

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
  void OnStreamReady(const std::shared_ptr<RequestStream>& stream) override;
  // Any thread: the write that the session's sink started has ended.
  void OnWriteDone(std::shared_ptr<GenerateSession> session, bool ok);
  // Any thread: a session that the engine has accepted. Known from now on, also to EndAll, although
  // the engine may never say anything about it.
  void Register(std::shared_ptr<GenerateSession> session);
  // Any thread: ends every registered session with the error of `reason`, for an engine that is
  // stuck and cannot do it.
  void EndAll(const char* reason);

 private:
  enum class What { kRegistered, kStreamReady, kWriteDone, kEndAll };
  struct Item {
    What what;
    std::shared_ptr<GenerateSession> session;         // not for kEndAll
    std::shared_ptr<RequestStream> stream = nullptr;  // kStreamReady
    bool write_ok = false;                            // kWriteDone
    const char* reason = nullptr;                     // kEndAll
  };
  void Push(Item item);
  void Run();
  // False when the thread must stop.
  bool WaitForItems(std::vector<Item>* items);
  void Handle(Item item);
  void HandleEndAll(const char* reason);
  void CheckSlowReaders();
  // Notes what the session waits for now.
  void Track(std::shared_ptr<GenerateSession> session);
  void SendWhatIsDue(TimePoint now);
  // When there is something to do although nothing happens; unset = never.
  std::optional<std::chrono::steady_clock::time_point> NextLook() const;

  const Clock* const clock_;
  const Duration check_interval_;

  Mutex mu_;
  CondVar wake_;
  std::vector<Item> queue_ ABSL_GUARDED_BY(mu_);
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
