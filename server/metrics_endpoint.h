// MetricsEndpoint: the Prometheus scrape target on its own port, with its own threads, so that it
// answers also when the engine or gRPC does not.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace prometheus {
class Collectable;
class Exposer;
class Registry;
}  // namespace prometheus

namespace flashquant {

class ProcessCollector;

class MetricsEndpoint final {
 public:
  // Serves GET /metrics at `address` (host:port). RESOURCE_EXHAUSTED "cannot bind".
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Start(
      const std::string& address, std::shared_ptr<prometheus::Registry> registry);
  // Takes milliseconds; up to two seconds when `address` is a host name.
  ~MetricsEndpoint();

  // More to be scraped, from now on.
  void Add(std::shared_ptr<prometheus::Collectable> collectable);

  int port() const;

 private:
  explicit MetricsEndpoint(std::string address);
  // Makes the exposer's accepting thread look whether it should end.
  void Wake() const;

  const std::string address_;
  std::shared_ptr<prometheus::Registry> registry_;
  std::shared_ptr<ProcessCollector> process_;
  std::vector<std::shared_ptr<prometheus::Collectable>> added_;
  std::unique_ptr<prometheus::Exposer> exposer_;
  int port_ = 0;
};

}  // namespace flashquant
