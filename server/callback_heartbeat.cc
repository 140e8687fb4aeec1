// Each beat has an alarm of its own: setting one anew inside its callback would replace the
// function that runs.
#include "server/callback_heartbeat.h"

#include "grpcpp/alarm.h"

namespace flashquant {

CallbackHeartbeat::CallbackHeartbeat(Metrics* metrics, Duration period)
    : metrics_(metrics), period_(period) {
  MutexLock lock(&mu_);
  Arm();
}

CallbackHeartbeat::~CallbackHeartbeat() {
  MutexLock lock(&mu_);
  stopping_ = true;
  alarm_->Cancel();
  while (armed_) ended_.Wait(&mu_);
}

void CallbackHeartbeat::Arm() {
  due_ = std::chrono::steady_clock::now() + period_;
  alarm_ = std::make_unique<grpc::Alarm>();
  armed_ = true;
  const auto wall = std::chrono::duration_cast<std::chrono::system_clock::duration>(period_);
  alarm_->Set(std::chrono::system_clock::now() + wall, [this](bool due) { Beat(due); });
}

void CallbackHeartbeat::Beat(bool due) {
  MutexLock lock(&mu_);
  if (due) metrics_->ObserveCallbackDelay(std::chrono::steady_clock::now() - due_);
  armed_ = false;
  if (stopping_) {
    ended_.NotifyAll();
  } else {
    Arm();
  }
}

}  // namespace flashquant
