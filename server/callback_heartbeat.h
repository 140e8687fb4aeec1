// CallbackHeartbeat: a task of gRPC's callback threads, once a period; how late it runs goes into
// grpc_callback_delay_seconds. A long delay shows that something blocks those threads: every call
// waits behind it, and nothing else would tell.
#pragma once

#include <chrono>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "engine/base/clock.h"
#include "engine/metrics.h"
#include "kernels/base/mutex.h"

namespace grpc {
class Alarm;
}  // namespace grpc

namespace flashquant {

class CallbackHeartbeat final {
 public:
  // Begins at once. `metrics` outlives the object.
  explicit CallbackHeartbeat(Metrics* metrics, Duration period = std::chrono::seconds(1));
  // Waits for a beat that runs, not for the one that is next. Not from a callback.
  ~CallbackHeartbeat();
  CallbackHeartbeat(const CallbackHeartbeat&) = delete;
  CallbackHeartbeat& operator=(const CallbackHeartbeat&) = delete;

 private:
  void Arm() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Beat(bool due);

  Metrics* const metrics_;
  const Duration period_;
  Mutex mu_;
  CondVar ended_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool armed_ ABSL_GUARDED_BY(mu_) = false;
  TimePoint due_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<grpc::Alarm> alarm_ ABSL_GUARDED_BY(mu_);
};

}  // namespace flashquant
