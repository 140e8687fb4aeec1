// Reads /proc/self. Source of the fields: proc(5).
#include "engine/process_collector.h"

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>

namespace flashquant {
namespace {

// The fields of /proc/self/stat after the program's name, which may hold spaces; [0] is field 3.
std::vector<std::string> ReadStatFields() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream rest(line.substr(name_end + 1));
  std::vector<std::string> fields;
  for (std::string field; rest >> field;) fields.push_back(field);
  return fields;
}

// Field `number` as proc(5) counts them.
std::optional<double> StatField(const std::vector<std::string>& fields, size_t number) {
  if (number < 3 || number - 3 >= fields.size()) return std::nullopt;
  double value = 0;
  std::istringstream text(fields[number - 3]);
  if (!(text >> value)) return std::nullopt;
  return value;
}

std::optional<double> BootTimeSeconds() {
  std::ifstream file("/proc/stat");
  std::string key;
  while (file >> key) {
    double value = 0;
    if (key == "btime" && file >> value) return value;
    std::getline(file, key);
  }
  return std::nullopt;
}

std::optional<double> OpenFiles() {
  std::error_code error;
  std::filesystem::directory_iterator entries("/proc/self/fd", error);
  if (error) return std::nullopt;
  double count = -1;  // the iterator's own
  for (const std::filesystem::directory_iterator end; entries != end; entries.increment(error)) {
    if (error) return std::nullopt;
    ++count;
  }
  return count;
}

prometheus::MetricFamily Family(const char* name, const char* help, prometheus::MetricType type,
                                double value) {
  prometheus::ClientMetric metric;
  if (type == prometheus::MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  return {name, help, type, {metric}};
}

}  // namespace

ProcessCollector::ProcessCollector() {
  constexpr size_t kStartTimeField = 22;  // ticks after boot
  const std::optional<double> ticks = StatField(ReadStatFields(), kStartTimeField);
  const std::optional<double> boot = BootTimeSeconds();
  const auto ticks_per_second = static_cast<double>(sysconf(_SC_CLK_TCK));
  if (ticks && boot && ticks_per_second > 0)
    start_time_seconds_ = *boot + *ticks / ticks_per_second;
}

std::vector<prometheus::MetricFamily> ProcessCollector::Collect() const {
  using prometheus::MetricType;
  std::vector<prometheus::MetricFamily> families;
  const std::vector<std::string> stat = ReadStatFields();
  if (const auto pages = StatField(stat, 24)) {
    families.push_back(Family("process_resident_memory_bytes", "Resident memory", MetricType::Gauge,
                              *pages * static_cast<double>(sysconf(_SC_PAGESIZE))));
  }
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) == 0) {
    const auto seconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    };
    families.push_back(Family("process_cpu_seconds_total", "User and system time spent",
                              MetricType::Counter,
                              seconds(usage.ru_utime) + seconds(usage.ru_stime)));
  }
  if (const auto open = OpenFiles()) {
    families.push_back(
        Family("process_open_fds", "Open file descriptors", MetricType::Gauge, *open));
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    families.push_back(Family("process_max_fds", "Most file descriptors that may be open",
                              MetricType::Gauge, static_cast<double>(limit.rlim_cur)));
  }
  if (const auto threads = StatField(stat, 20)) {
    families.push_back(Family("process_threads", "Threads", MetricType::Gauge, *threads));
  }
  if (start_time_seconds_ > 0) {
    families.push_back(Family("process_start_time_seconds", "Start of the process, Unix time",
                              MetricType::Gauge, start_time_seconds_));
  }
  return families;
}

}  // namespace flashquant
