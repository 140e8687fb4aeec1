// A sink that counts beside the one that writes.
#include "server/logging.h"

#include <memory>
#include <string>
#include <vector>

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

}  // namespace

void InitLogging(std::string_view level, Metrics* metrics) {
  std::vector<spdlog::sink_ptr> sinks = {std::make_shared<spdlog::sinks::stderr_sink_mt>()};
  if (metrics != nullptr) sinks.push_back(std::make_shared<CountingSink>(metrics));
  auto logger = std::make_shared<spdlog::logger>("flashquant", sinks.begin(), sinks.end());
  logger->set_level(spdlog::level::from_str(std::string(level)));
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace flashquant
