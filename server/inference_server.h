// InferenceServer: the listening gRPC server with its service, health, reflection and delivery
// thread. Its port is open before the model is there; until SetServing every call answers
// UNAVAILABLE (MODEL_LOADING).
//
// gRPC stays behind the Impl, so that whoever starts a server (serve_process.cc, tests) compiles
// quickly.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/metrics.h"
#include "engine/request_stream.h"
#include "server/call_submitter.h"
#include "server/server_security.h"

namespace flashquant {

struct InferenceServerOptions {
  std::string address = "127.0.0.1:0";  // port 0 = any free one
  std::string admin_address;            // of AdminService, with a server of its own; empty = none
  std::string model_name;               // health also answers for "model/<name>"
  bool reflection = false;
  const ServerSecurity* security = nullptr;  // null: plain text, anybody may call; outlives it
  int32_t max_streams_per_connection = 256;
  Duration keepalive = std::chrono::seconds(60);
  Duration keepalive_timeout = std::chrono::seconds(20);
  Duration slow_reader = std::chrono::seconds(10);
  Duration max_request_duration = std::chrono::seconds(600);
  // What gRPC may hold, of messages that have not come whole above all: it looks at a message's
  // length only then. Beyond it the library resets streams that hold much.
  int64_t memory_quota_bytes = int64_t{512} << 20;
};

// Version of the gRPC library.
std::string GrpcVersion();

// All methods from the thread that made it, unless they say otherwise.
class InferenceServer final {
 public:
  // RESOURCE_EXHAUSTED "cannot bind <address>" when the port is taken or the address is not ours.
  // `metrics` may be null; `clock` and `metrics` outlive the server.
  static absl::StatusOr<std::unique_ptr<InferenceServer>> Start(
      const InferenceServerOptions& options, Metrics* metrics, const Clock* clock);
  // Shuts down at once if Shutdown was not called. The engine must be gone by then.
  ~InferenceServer();

  int port() const;
  int admin_port() const;  // 0 = no AdminService
  // For EngineDependencies::listener.
  StreamListener* listener();

  // Health turns SERVING. Once.
  void SetServing(std::unique_ptr<const ServingModel> model);
  // New calls answer UNAVAILABLE (DRAINING) and health turns NOT_SERVING at once; what runs goes
  // on.
  void SetDraining();
  // The same with ENGINE_FAILED. Any thread.
  void SetFailed();
  // Ends every call that the engine has accepted with ENGINE_FAILED, for an engine that is stuck.
  // After SetFailed. Any thread.
  void EndAllCalls();

  int64_t live_calls();
  // False when `deadline` passed first.
  bool WaitUntilNoCalls(TimePoint deadline);

  // Closes the listener, cancels at `deadline` what still runs, and waits for every call to end.
  // Every accepted call ends because the engine ends it: so after Engine::Drain.
  void Shutdown(TimePoint deadline);

 private:
  class Impl;
  explicit InferenceServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashquant
