#include "engine/device_collector.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

namespace flashquant {
namespace {

using prometheus::MetricType;

// One family, a series for each (label value, sample); without a label name, one series.
class FamilyBuilder {
 public:
  FamilyBuilder(const char* name, const char* help, MetricType type, std::string device)
      : device_(std::move(device)) {
    family_.name = std::string("flashquant_device_") + name;
    family_.help = help;
    family_.type = type;
  }
  FamilyBuilder& Add(double value, const char* label = nullptr, const char* label_value = "") {
    prometheus::ClientMetric metric;
    metric.label = {{"device", device_}};
    if (label != nullptr) metric.label.push_back({label, label_value});
    if (family_.type == MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
    family_.metric.push_back(std::move(metric));
    return *this;
  }
  prometheus::MetricFamily Take() { return std::move(family_); }

 private:
  const std::string device_;
  prometheus::MetricFamily family_;
};

}  // namespace

std::vector<prometheus::MetricFamily> DeviceCollector::Collect() const {
  GpuReading reading;
  std::string device;
  {
    const MutexLock lock(&mu_);
    reading = monitor_->Read();
    device = std::to_string(monitor_->index());
  }
  std::vector<prometheus::MetricFamily> families;
  const auto gauge = [&](const char* name, const char* help, std::optional<double> value) {
    if (!value.has_value()) return;
    families.push_back(FamilyBuilder(name, help, MetricType::Gauge, device).Add(*value).Take());
  };
  if (reading.memory_total_bytes.has_value() && reading.memory_used_bytes.has_value()) {
    const int64_t own = memory_.weights + memory_.kv + memory_.workspace;
    const auto value = [](int64_t num_bytes) {
      return static_cast<double>(std::max<int64_t>(0, num_bytes));
    };
    families.push_back(
        FamilyBuilder("memory_bytes", "Memory of the GPU", MetricType::Gauge, device)
            .Add(value(memory_.weights), "kind", "weights")
            .Add(value(memory_.kv), "kind", "kv")
            .Add(value(memory_.workspace), "kind", "workspace")
            .Add(value(*reading.memory_used_bytes - own), "kind", "other")
            .Add(value(*reading.memory_total_bytes - *reading.memory_used_bytes), "kind", "free")
            .Take());
  }
  gauge("utilization_ratio", "Share of the time in which the GPU ran a kernel",
        reading.utilization);
  gauge("temperature_celsius", "Temperature of the GPU", reading.temperature_celsius);
  gauge("power_watts", "Power that the GPU draws", reading.power_watts);
  FamilyBuilder clocks("clock_hertz", "Clocks of the GPU", MetricType::Gauge, device);
  if (reading.sm_clock_hertz) clocks.Add(*reading.sm_clock_hertz, "domain", "sm");
  if (reading.memory_clock_hertz) clocks.Add(*reading.memory_clock_hertz, "domain", "memory");
  if (prometheus::MetricFamily family = clocks.Take(); !family.metric.empty()) {
    families.push_back(std::move(family));
  }
  if (reading.energy_joules.has_value()) {
    families.push_back(FamilyBuilder("energy_joules_total", "Energy that the GPU has used",
                                     MetricType::Counter, device)
                           .Add(*reading.energy_joules)
                           .Take());
  }
  if (reading.ecc_errors.has_value()) {
    families.push_back(
        FamilyBuilder("errors_total", "Errors of the GPU", MetricType::Counter, device)
            .Add(static_cast<double>(*reading.ecc_errors), "kind", "ecc")
            .Take());
  }
  return families;
}

}  // namespace flashquant
