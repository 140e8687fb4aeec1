// The exposer throws when it cannot bind; that stops here. It also ends slowly: its accepting
// thread (civetweb 1.15) sleeps in poll for up to two seconds before it looks at its stop flag. A
// connection wakes it.
#include "server/metrics_endpoint.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "engine/process_collector.h"
#include "kernels/base/status_macros.h"
#include "prometheus/exposer.h"
#include "prometheus/registry.h"

namespace flashquant {

namespace {

constexpr auto kWakeInterval = std::chrono::milliseconds(10);

// What anybody who reaches the port may take: a thread for a second. Threads that wait cost little;
// with few of them, as many silent connections would keep a scraper out.
std::vector<std::string> ListenerOptions(const std::string& address) {
  return {"listening_ports",   address, "num_threads",      "32",   "request_timeout_ms", "1000",
          "linger_timeout_ms", "100",   "max_request_size", "8192", "connection_queue",   "64",
          "listen_backlog",    "64"};
}

}  // namespace

MetricsEndpoint::MetricsEndpoint(std::string address) : address_(std::move(address)) {}

MetricsEndpoint::~MetricsEndpoint() {
  if (exposer_ == nullptr) return;
  std::atomic<bool> ended{false};
  std::thread waker([&] {
    // The first may come before the stop flag is set.
    while (!ended.load()) {
      Wake();
      std::this_thread::sleep_for(kWakeInterval);
    }
  });
  exposer_.reset();
  ended.store(true);
  waker.join();
}

void MetricsEndpoint::Wake() const {
  const size_t colon = address_.rfind(':');
  if (colon == std::string::npos) return;
  std::string host = address_.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;  // no look-up: this must not wait
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* target = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port_).c_str(), &hints, &target) != 0) return;
  const int connection =
      socket(target->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, target->ai_protocol);
  if (connection >= 0) {
    // Whether it succeeds shows in the end of the thread.
    (void)connect(connection, target->ai_addr, target->ai_addrlen);
    close(connection);
  }
  freeaddrinfo(target);
}

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Start(
    const std::string& address, std::shared_ptr<prometheus::Registry> registry) {
  std::unique_ptr<MetricsEndpoint> endpoint(new MetricsEndpoint(address));
  endpoint->registry_ = std::move(registry);
  endpoint->process_ = std::make_shared<ProcessCollector>();
  try {
    endpoint->exposer_ = std::make_unique<prometheus::Exposer>(ListenerOptions(address));
  } catch (const std::exception& error) {
    return ResourceExhaustedError(
        "cannot bind {} for metrics: port in use, not allowed, or no such address ({})", address,
        error.what());
  }
  endpoint->port_ = endpoint->exposer_->GetListeningPorts().front();
  endpoint->exposer_->RegisterCollectable(endpoint->registry_);
  endpoint->exposer_->RegisterCollectable(endpoint->process_);
  return endpoint;
}

void MetricsEndpoint::Add(std::shared_ptr<prometheus::Collectable> collectable) {
  exposer_->RegisterCollectable(collectable);
  added_.push_back(std::move(collectable));
}

int MetricsEndpoint::port() const { return port_; }

}  // namespace flashquant
