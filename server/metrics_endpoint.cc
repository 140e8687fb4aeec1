// The exposer throws when it cannot bind; that stops here.
#include "server/metrics_endpoint.h"

#include <exception>
#include <utility>

#include "engine/process_collector.h"
#include "kernels/base/status_macros.h"
#include "prometheus/exposer.h"
#include "prometheus/registry.h"

namespace flashquant {

MetricsEndpoint::MetricsEndpoint() = default;
MetricsEndpoint::~MetricsEndpoint() = default;

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Start(
    const std::string& address, std::shared_ptr<prometheus::Registry> registry) {
  std::unique_ptr<MetricsEndpoint> endpoint(new MetricsEndpoint());
  endpoint->registry_ = std::move(registry);
  endpoint->process_ = std::make_shared<ProcessCollector>();
  try {
    endpoint->exposer_ = std::make_unique<prometheus::Exposer>(address);
  } catch (const std::exception& error) {
    return ResourceExhaustedError("cannot bind {} for metrics: {}", address, error.what());
  }
  endpoint->exposer_->RegisterCollectable(endpoint->registry_);
  endpoint->exposer_->RegisterCollectable(endpoint->process_);
  return endpoint;
}

int MetricsEndpoint::port() const { return exposer_->GetListeningPorts().front(); }

}  // namespace flashquant
