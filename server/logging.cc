// A sink that counts beside the one that writes.
#include "server/logging.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/clock.h"
#include "grpc/support/log.h"
#include "spdlog/sinks/base_sink.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace flashquant {
namespace {

LogLevel LevelOf(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::trace:
      return LogLevel::kTrace;
    case spdlog::level::debug:
      return LogLevel::kDebug;
    case spdlog::level::warn:
      return LogLevel::kWarning;
    case spdlog::level::err:
      return LogLevel::kError;
    case spdlog::level::critical:
      return LogLevel::kCritical;
    default:
      return LogLevel::kInfo;
  }
}

class CountingSink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  explicit CountingSink(Metrics* metrics) : metrics_(metrics) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    metrics_->LogMessage(LevelOf(message.level));
  }
  void flush_() override {}

 private:
  Metrics* const metrics_;
};

constexpr std::string_view kHandshakeFailed = "Security handshake failed";

// Set once, never freed: gRPC may log until the process ends.
std::atomic<const std::function<void()>*> on_handshake_failure{nullptr};

// What gRPC complains about, mostly broken peers: at most one line a minute, so that nobody can
// flood the log. The rest is there at level debug.
void LogGrpc(gpr_log_func_args* args) {
  const std::function<void()>* on_failure = on_handshake_failure.load();
  if (on_failure != nullptr && std::string_view(args->message).starts_with(kHandshakeFailed)) {
    (*on_failure)();
  }
  static std::atomic<TimePoint::rep> next{0};
  const TimePoint::rep now = std::chrono::steady_clock::now().time_since_epoch().count();
  TimePoint::rep due = next.load();
  constexpr Duration kInterval = std::chrono::minutes(1);
  const bool may_warn = args->severity == GPR_LOG_SEVERITY_ERROR && now >= due &&
                        next.compare_exchange_strong(due, now + kInterval.count());
  spdlog::log(may_warn ? spdlog::level::warn : spdlog::level::debug, "grpc: {}", args->message);
}

}  // namespace

void InitLogging(std::string_view level, Metrics* metrics) {
  std::vector<spdlog::sink_ptr> sinks = {std::make_shared<spdlog::sinks::stderr_sink_mt>()};
  if (metrics != nullptr) sinks.push_back(std::make_shared<CountingSink>(metrics));
  auto logger = std::make_shared<spdlog::logger>("flashquant", sinks.begin(), sinks.end());
  logger->set_level(spdlog::level::from_str(std::string(level)));
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  gpr_set_log_function(LogGrpc);
}

void WatchHandshakes(std::function<void()> on_failure) {
  on_handshake_failure.store(new std::function<void()>(std::move(on_failure)));
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_DEBUG);
}

}  // namespace flashquant
