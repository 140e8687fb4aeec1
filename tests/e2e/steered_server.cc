// A TestServer as a process of its own, for clients that are not C++: ports and answers on stdout,
// one command a line on stdin, end of input ends it. Its model is the pretended one: quick, and
// waiting, failing or drawing NaN when it is told to.
//
//   steered_server [--tokens FILE]
//   serve        loading is over                gate close|open   steps stand still
//   at-gate      waits until a step does        fail              the next step fails
//   drain        refuses new calls              leaks             "ok" or what has leaked
//   sum METRIC   over all its series
//   shutdown     begins to end what runs, which needs an open gate
//
// A request with seed 666 gets NaN at its third token.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "fmt/format.h"
#include "server/server_security.h"
#include "server/shutdown.h"
#include "tests/e2e/test_server.h"

namespace flashquant {
namespace {

constexpr uint64_t kNonFiniteSeed = 666;
constexpr int64_t kNonFinitePosition = 2;

TestServerOptions Options(const ServerSecurity* security) {
  TestServerOptions options;
  options.engine.max_sequences = 2;
  options.engine.max_waiting = 2;
  options.engine.num_blocks = 65;  // 1024 tokens: less than the context
  options.server.security = security;
  options.server.reflection = true;
  options.server.admin_address = "127.0.0.1:0";
  options.server.slow_reader = std::chrono::seconds(1);
  options.server.memory_quota_bytes = int64_t{64} << 20;
  options.max_request_duration = std::chrono::seconds(4);
  options.text_repeat = 2000;  // ten kilobytes per token: more than transports take in
  options.serve = false;
  return options;
}

// The answer to one command.
std::string Obey(const std::string& line, TestServer* server, std::atomic<bool>* fail_next,
                 std::thread* shutdown) {
  std::istringstream words(line);
  std::string command, argument;
  words >> command >> argument;
  if (command == "serve") {
    server->Serve();
  } else if (command == "gate" && argument == "close") {
    server->runner().CloseGate();
  } else if (command == "gate" && argument == "open") {
    server->runner().OpenGate();
  } else if (command == "at-gate") {
    server->runner().WaitUntilAtGate();
  } else if (command == "fail") {
    fail_next->store(true);
  } else if (command == "drain") {
    server->server().SetDraining();
  } else if (command == "shutdown" && !shutdown->joinable()) {
    *shutdown = std::thread([server] {
      DrainServer(&server->server(), &server->engine(), std::chrono::steady_clock::now(),
                  [] { return true; });
    });
  } else if (command == "sum") {
    return fmt::format("{}", server->Scrape().Sum(argument));
  } else if (command == "leaks") {
    const std::string leaks = server->LeakCheck();
    return leaks.empty() ? "ok" : leaks;
  } else {
    return "unknown command";
  }
  return "ok";
}

int Run(const std::string& token_file) {
  std::unique_ptr<ServerSecurity> security;
  if (!token_file.empty()) {
    auto loaded = ServerSecurity::Load({.tls = {}, .tokens = token_file});
    if (!loaded.ok()) {
      fmt::print(stderr, "{}\n", std::string(loaded.status().message()));
      return 1;
    }
    security = *std::move(loaded);
  }
  TestServer server(Options(security.get()));
  std::atomic<bool> fail_next{false};
  FakeStepRunner& runner = server.runner();
  runner.OnLaunch([&](const StepPlan&) {
    if (fail_next.load()) runner.FailLaunch(runner.num_launched());
  });
  runner.SetNonFinite([](const SequenceStep& step) {
    return step.sampling->seed == kNonFiniteSeed && step.output_position == kNonFinitePosition;
  });
  fmt::print("{} {}\n", server.server().port(), server.server().admin_port());
  std::fflush(stdout);
  std::thread shutdown;
  for (std::string line; std::getline(std::cin, line);) {
    fmt::print("{}\n", Obey(line, &server, &fail_next, &shutdown));
    std::fflush(stdout);
  }
  if (shutdown.joinable()) shutdown.join();
  return 0;
}

}  // namespace
}  // namespace flashquant

int main(int argc, char** argv) {
  if (argc != 1 && !(argc == 3 && std::string(argv[1]) == "--tokens")) {
    std::cerr << "usage: steered_server [--tokens FILE]\n";
    return 64;
  }
  return flashquant::Run(argc == 3 ? argv[2] : "");
}
