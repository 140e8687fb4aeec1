// ModelServer: a server in this process over a real model, as serve_process.cc wires it: the demo
// model where it is built in, else a tiny one of the same architecture.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "engine/model/served_model.h"
#include "prometheus/registry.h"
#include "server/metrics_endpoint.h"
#include "server/server_config.h"
#include "tests/e2e/exposition.h"
#include "tests/e2e/test_server.h"

namespace flashquant {

class ModelServer {
 public:
  // Zeros in `engine_config` are filled in as for `flashquant serve`. Check ok() first.
  ModelServer(const EngineConfig& engine_config, int32_t row_multiple);
  ~ModelServer();

  const ServedModel& model() const { return *model_; }
  Engine& engine() { return *engine_; }
  InferenceServer& server() { return *server_; }
  bool ok() const { return engine_ != nullptr && endpoint_ != nullptr; }
  std::string target() const { return "127.0.0.1:" + std::to_string(server_->port()); }

  // What a scraper sees, read strictly.
  Exposition Scrape();

 private:
  ServerConfig config_;
  const SteadyClock clock_;
  std::optional<ServedModel> model_;
  std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  std::optional<Metrics> metrics_;
  std::unique_ptr<InferenceServer> server_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<MetricsEndpoint> endpoint_;
};

// One call on a connection of its own, cancelled by the client once it has `cancel_after` tokens;
// -1 = never.
Answer RunOne(const std::string& target, const v1::GenerateRequest& request, int cancel_after);

}  // namespace flashquant
