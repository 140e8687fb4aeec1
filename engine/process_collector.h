// ProcessCollector: the usual process_* metrics, read from /proc when scraped. prometheus-cpp has
// none of its own.
#pragma once

#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace flashquant {

// Register it with the exposer beside the registry. Any thread. A value that cannot be read is left
// out, never shown as 0.
class ProcessCollector final : public prometheus::Collectable {
 public:
  ProcessCollector();
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  double start_time_seconds_ = 0;  // Unix time, 0 = unknown
};

}  // namespace flashquant
