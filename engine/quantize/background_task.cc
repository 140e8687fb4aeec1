#include "engine/quantize/background_task.h"

#include <system_error>
#include <utility>

#include "kernels/base/check.h"

namespace flashquant {

BackgroundTask::~BackgroundTask() {
  if (thread_.joinable()) thread_.join();
}

void BackgroundTask::Start(std::function<absl::Status()> work) {
  FQ_CHECK(!thread_.joinable());
  try {
    thread_ = std::thread([this, work] { status_ = work(); });
  } catch (const std::system_error&) {
    status_ = work();
  }
}

absl::Status BackgroundTask::Wait() {
  if (thread_.joinable()) thread_.join();
  return std::exchange(status_, absl::OkStatus());
}

}  // namespace flashquant
