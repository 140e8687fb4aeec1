// A GPU's own metrics, with a stand-in for the driver's management library: names, labels, values,
// and that what the card does not say is left out.
#include "engine/device_collector.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>

#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

constexpr char kBusId[] = "0000:0d:00.0";

TEST(DeviceCollectorTest, ShowsWhatTheCardSaysAndLeavesOutTheRest) {
  auto monitor = GpuMonitor::Open(kBusId, FQ_FAKE_NVML);
  FQ_ASSERT_OK(monitor);
  const DeviceCollector collector(*std::move(monitor),
                                  {.weights = 300, .kv = 400, .workspace = 50});
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : collector.Collect()) {
    for (const prometheus::ClientMetric& metric : family.metric) {
      std::string name = family.name;
      for (const auto& label : metric.label) name += " " + label.name + "=" + label.value;
      values[name] = family.type == prometheus::MetricType::Counter ? metric.counter.value
                                                                    : metric.gauge.value;
    }
  }
  const std::map<std::string, double> expected = {
      {"flashquant_device_memory_bytes device=3 kind=weights", 300},
      {"flashquant_device_memory_bytes device=3 kind=kv", 400},
      {"flashquant_device_memory_bytes device=3 kind=workspace", 50},
      {"flashquant_device_memory_bytes device=3 kind=other", 50},
      {"flashquant_device_memory_bytes device=3 kind=free", 200},
      {"flashquant_device_utilization_ratio device=3", 0.42},
      {"flashquant_device_temperature_celsius device=3", 61},
      {"flashquant_device_power_watts device=3", 250.5},
      {"flashquant_device_clock_hertz device=3 domain=sm", 1.98e9},
      {"flashquant_device_clock_hertz device=3 domain=memory", 3.201e9},
      {"flashquant_device_errors_total device=3 kind=ecc", 2},
  };
  EXPECT_EQ(values, expected);
}

TEST(DeviceCollectorTest, MissingLibraryOrCardIsAnErrorAndNothingElse) {
  EXPECT_EQ(GpuMonitor::Open(kBusId, "libnot-there.so").status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(GpuMonitor::Open("0000:ff:00.0", FQ_FAKE_NVML).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace flashquant
