// The program as its user sees it: flashquant serve as a process of its own, signals, exit codes,
// the client subcommands. Ids in comments are rows of the reliability matrix.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "engine/base/exit_code.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/inference_client.h"
#include "tests/e2e/exposition.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/test_server.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

TEST(ServeProcessTest, ServesAndEndsOnSigterm) {  // L2
  ServeProcess serve;
  ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
  InferenceClient client(serve.target());
  Answer answer;
  ASSERT_TRUE(client
                  .Generate(IdsRequest(8),
                            [&](const v1::GenerateResponse& response) {
                              answer.Add(response);
                              return true;
                            })
                  .ok());
  EXPECT_EQ(answer.ids.size(), 8u);
  // A call is counted when it is gone from the server, a moment after its client has the answer.
  absl::StatusOr<Exposition> metrics;
  EXPECT_TRUE(Eventually([&] {
    metrics = Exposition::Parse(HttpGet(serve.metrics_port(), "/metrics"));
    return metrics.ok() && metrics->Sum("flashquant_requests_finished_total") == 1;
  }));
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  EXPECT_EQ(metrics->Sum("flashquant_model_ready"), 1);
  EXPECT_TRUE(metrics->Has("process_resident_memory_bytes"));
  serve.Signal(SIGTERM);
  EXPECT_EQ(serve.Wait(), 0) << serve.err();
  EXPECT_THAT(serve.err(), HasSubstr("all calls ended"));
}

TEST(ServeProcessTest, SigtermWithoutADrainEndsWhatRuns) {  // L3
  ServeProcess serve({"--drain-seconds", "0", "--max-sequences", "1"});
  ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
  constexpr int kNumClients = 40;
  std::vector<std::thread> clients;
  std::atomic<int> drained{0}, answered{0};
  std::mutex mu;
  std::vector<std::string> other;
  for (int i = 0; i < kNumClients; ++i) {
    clients.emplace_back([&] {
      InferenceClient client(serve.target());
      const CallResult result =
          client.Generate(IdsRequest(200), [](const v1::GenerateResponse&) { return true; });
      if (result.ok()) {
        ++answered;
      } else if (result.reason == "DRAINING") {
        ++drained;
      } else {
        const std::lock_guard<std::mutex> lock(mu);
        other.push_back(result.message);
      }
    });
  }
  EXPECT_TRUE(Eventually([&] {
    const auto metrics = Exposition::Parse(HttpGet(serve.metrics_port(), "/metrics"));
    return metrics.ok() && metrics->Sum("flashquant_requests_received_total") == kNumClients;
  }));
  const TimePoint start = std::chrono::steady_clock::now();
  serve.Signal(SIGTERM);
  EXPECT_EQ(serve.Wait(), 0) << serve.err();
  EXPECT_LT(std::chrono::steady_clock::now() - start, 8s);
  for (std::thread& thread : clients) thread.join();
  // Each got its whole answer or was told why not.
  EXPECT_THAT(other, ::testing::IsEmpty());
  EXPECT_EQ(answered + drained, kNumClients);
}

TEST(ServeProcessTest, SecondSignalEndsAtOnce) {  // L4
  ServeProcess serve({"--drain-seconds", "600"});
  ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
  serve.Signal(SIGINT);
  serve.Signal(SIGTERM);
  EXPECT_EQ(serve.Wait(2s), 0) << serve.err();
}

// The scrape endpoint's own poll would take up to two seconds.
TEST(ServeProcessTest, AnIdleServerEndsAtOnce) {
  for (const char* address : {"127.0.0.1:0", "0.0.0.0:0"}) {
    ServeProcess serve({"--metrics-listen", address});
    ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
    ASSERT_NE(HttpGet(serve.metrics_port(), "/metrics"), "");
    const TimePoint start = std::chrono::steady_clock::now();
    serve.Signal(SIGTERM);
    EXPECT_EQ(serve.Wait(10s), 0) << serve.err();
    EXPECT_LT(std::chrono::steady_clock::now() - start, 1s) << address;
  }
}

TEST(ServeProcessTest, StateDumpAndIgnoredSignals) {  // L6, L7
  ServeProcess serve;
  ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
  serve.Signal(SIGPIPE);
  serve.Signal(SIGHUP);
  serve.Signal(SIGUSR1);
  EXPECT_TRUE(Eventually([&] {
    return serve.err().find("state: 0 calls open") != std::string::npos;
  })) << serve.err();
  EXPECT_EQ(InferenceClient(serve.target()).Health(""), HealthState::kServing);
}

TEST(ServeProcessTest, RestartAfterSigkillTakesThePortAtOnce) {  // L5
  std::string address;
  {
    ServeProcess serve;
    ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
    address = serve.target();
    serve.Signal(SIGKILL);
    EXPECT_EQ(serve.Wait(), 128 + SIGKILL);
  }
  ServeProcess again({"--listen", address});
  EXPECT_TRUE(again.WaitUntilServing()) << again.err();
  EXPECT_EQ(again.target(), address);
}

TEST(ServeProcessTest, WrongFlagsAreUsageErrors) {  // C1
  Process process({"serve", "--modle", "x"});
  EXPECT_EQ(process.Wait(), kExitUsage);
  Process none({});
  EXPECT_EQ(none.Wait(), kExitUsage);
}

TEST(ServeProcessTest, BadConfigurationHasItsExitCode) {  // C2, C5
  Process number({"serve", "--model", "x", "--max-waiting", "none"});
  EXPECT_EQ(number.Wait(), kExitBadConfig);
  EXPECT_THAT(number.err(), HasSubstr("limits.max_waiting: must be a whole number"));
  Process open({"serve", "--model", "x", "--listen", "0.0.0.0:50051"});
  EXPECT_EQ(open.Wait(), kExitBadConfig);
  EXPECT_THAT(open.err(), HasSubstr("refusing insecure bind"));
}

TEST(ServeProcessTest, PortInUseIsASystemError) {  // C3
  ServeProcess first;
  Process second({"serve", "--model", TestDataPath("tiny_models/llama"), "--listen", first.target(),
                  "--metrics-listen", "off"});
  EXPECT_EQ(second.Wait(), kExitSystem);
  EXPECT_THAT(second.err(), HasSubstr("flashquant: cannot bind " + first.target()));
  Process metrics({"serve", "--model", TestDataPath("tiny_models/llama"), "--listen", "127.0.0.1:0",
                   "--metrics-listen", "127.0.0.1:" + std::to_string(first.metrics_port())});
  EXPECT_EQ(metrics.Wait(), kExitSystem);
  EXPECT_THAT(metrics.err(), HasSubstr("for metrics"));
}

TEST(ServeProcessTest, MissingModelEndsWithOneLine) {  // M1
  Process process({"serve", "--model", "no/such/model", "--listen", "127.0.0.1:0",
                   "--metrics-listen", "off", "--log-level", "error"});
  EXPECT_EQ(process.Wait(), kExitNoInput);
  EXPECT_THAT(process.err(), HasSubstr("no/such/model"));
  const std::string text = process.err();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
}

TEST(ServeProcessTest, CheckConfigPrintsEffectiveValues) {  // C11
  Process process({"serve", "--model", "some/model", "--max-sequences", "3", "--check-config"});
  EXPECT_EQ(process.Wait(), 0);
  EXPECT_THAT(process.out(), HasSubstr("engine.max_sequences = 3\n"));
  EXPECT_THAT(process.out(), HasSubstr("model.path = some/model\n"));
}

TEST(ClientCommandTest, GenerateStreamsIdsAndFigures) {
  ServeProcess serve;
  ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
  Process ids({"generate", "--target", serve.target(), "--prompt-ids", "1,2,3", "--max-tokens", "5",
               "--temperature", "0", "--ignore-eos"});
  EXPECT_EQ(ids.Wait(), 0) << ids.err();
  EXPECT_THAT(ids.err(), HasSubstr("3 tokens in, 5 out (length), first token "));
  Process json({"generate", "--target", serve.target(), "--prompt-ids", "1,2,3", "--max-tokens",
                "5", "--temperature", "0", "--ignore-eos", "--json"});
  EXPECT_EQ(json.Wait(), 0) << json.err();
  EXPECT_THAT(json.out(), ::testing::StartsWith("{\"accepted\":{"));
  EXPECT_THAT(json.out(), HasSubstr("\n{\"finished\":{"));
}

TEST(ClientCommandTest, ErrorsAreToldPlainly) {
  ServeProcess serve;
  ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
  Process bad({"generate", "--target", serve.target(), "--prompt-ids", "1", "--temperature", "9",
               "--top-p", "7"});
  EXPECT_EQ(bad.Wait(), kExitUsage);
  EXPECT_EQ(bad.out(), "");
  EXPECT_THAT(bad.err(), HasSubstr("INVALID_ARGUMENT: PARAMETER_OUT_OF_RANGE: "
                                   "sampling.temperature: must be within 0 and 2\n"));
  EXPECT_THAT(bad.err(), HasSubstr("also sampling.top_p: must be above 0 and at most 1"));
  Process json(
      {"generate", "--target", serve.target(), "--prompt-ids", "1", "--top-p", "7", "--json"});
  EXPECT_EQ(json.Wait(), kExitUsage);
  EXPECT_THAT(json.out(), HasSubstr("\"reason\":\"PARAMETER_OUT_OF_RANGE\""));
}

TEST(ClientCommandTest, HealthTellsByExitCode) {
  {
    ServeProcess serve;
    ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
    Process up({"health", "--target", serve.target(), "--service", "model/llama"});
    EXPECT_EQ(up.Wait(), 0) << up.err();
    EXPECT_EQ(up.out(), "serving\n");
    Process unknown({"health", "--target", serve.target(), "--service", "model/other"});
    EXPECT_NE(unknown.Wait(), 0);
  }
  Process down({"health", "--target", "127.0.0.1:1", "--timeout", "2"});
  EXPECT_EQ(down.Wait(), kExitUnavailable);
  EXPECT_THAT(down.out(), HasSubstr("unreachable"));
  EXPECT_THAT(down.err(), Not(HasSubstr("children")));
}

}  // namespace
}  // namespace flashquant
