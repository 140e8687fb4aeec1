// DeviceCollector: the device_* metrics of a GPU, asked of the driver when scraped (GpuMonitor).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/mutex.h"
#include "kernels/gpu_monitor.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace flashquant {

// What this process holds of the card's memory, bytes.
struct DeviceMemory {
  int64_t weights = 0;
  int64_t kv = 0;
  int64_t workspace = 0;
};

// Register it with the exposer. Any thread. A value that the card does not give is left out, never
// shown as 0. The kinds of memory sum to the card's.
class DeviceCollector final : public prometheus::Collectable {
 public:
  DeviceCollector(std::unique_ptr<GpuMonitor> monitor, const DeviceMemory& memory)
      : memory_(memory), monitor_(std::move(monitor)) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const DeviceMemory memory_;
  mutable Mutex mu_;
  const std::unique_ptr<GpuMonitor> monitor_ ABSL_PT_GUARDED_BY(mu_);
};

}  // namespace flashquant
