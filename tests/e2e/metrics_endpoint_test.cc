// What clients of the metrics port may cost: silent ones, greedy ones, those that do not read.
#include "server/metrics_endpoint.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/metrics.h"
#include "fmt/format.h"
#include "gtest/gtest.h"
#include "prometheus/gauge.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "tests/e2e/exposition.h"
#include "tests/e2e/test_server.h"

namespace flashquant {
namespace {

using namespace std::chrono_literals;

constexpr char kGet[] = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

class Connection {
 public:
  explicit Connection(int port, int receive_buffer = 0) : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer > 0) {
      setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    EXPECT_EQ(connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Connection() { close(socket_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void Send(const std::string& bytes) {
    EXPECT_GE(send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
  }
  // What comes until the server closes; nullopt when it does not within `limit`.
  std::optional<std::string> UntilClosed(Duration limit) {
    std::string received;
    const TimePoint end = std::chrono::steady_clock::now() + limit;
    while (std::chrono::steady_clock::now() < end) {
      pollfd ready = {socket_, POLLIN, 0};
      if (poll(&ready, 1, 100) != 1) continue;
      char bytes[4096];
      const ssize_t n = recv(socket_, bytes, sizeof(bytes), 0);
      if (n <= 0) return received;
      received.append(bytes, static_cast<size_t>(n));
    }
    return std::nullopt;
  }

 private:
  const int socket_;
};

class MetricsEndpointTest : public testing::Test {
 protected:
  MetricsEndpointTest() {
    auto endpoint = MetricsEndpoint::Start("127.0.0.1:0", registry_);
    EXPECT_TRUE(endpoint.ok()) << endpoint.status();
    endpoint_ = *std::move(endpoint);
  }
  bool Answers() { return !HttpGet(endpoint_->port(), "/metrics").empty(); }

  std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  std::unique_ptr<MetricsEndpoint> endpoint_;
};

TEST_F(MetricsEndpointTest, SilentConnectionsAreClosedAndKeepNoScraperOut) {  // O1
  std::vector<std::unique_ptr<Connection>> silent;
  for (int i = 0; i < 64; ++i) silent.push_back(std::make_unique<Connection>(endpoint_->port()));
  EXPECT_TRUE(Answers());
  for (const auto& connection : silent) EXPECT_TRUE(connection->UntilClosed(20s).has_value());
}

TEST_F(MetricsEndpointTest, ARequestThatComesByteByByteIsCut) {  // O1
  Connection connection(endpoint_->port());
  connection.Send("GET /metr");
  const auto received = connection.UntilClosed(20s);
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->find(" 200 "), std::string::npos);
  EXPECT_TRUE(Answers());
}

TEST_F(MetricsEndpointTest, LongHeadersAreRefused) {
  Connection connection(endpoint_->port());
  connection.Send("GET /metrics HTTP/1.1\r\nX-Long: " + std::string(20000, 'x') + "\r\n\r\n");
  const auto received = connection.UntilClosed(20s);
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->find(" 200 "), std::string::npos);
  EXPECT_TRUE(Answers());
}

TEST_F(MetricsEndpointTest, ScrapersThatDoNotReadAreCutAndOthersServed) {  // O1
  // More than the buffers between the two ends take.
  auto& family = prometheus::BuildGauge().Name("large").Register(*registry_);
  for (int i = 0; i < 16; ++i)
    family.Add({{"text", fmt::format("{}", i) + std::string(1 << 20, 'x')}});
  std::vector<std::unique_ptr<Connection>> deaf;
  for (int i = 0; i < 3; ++i) {
    deaf.push_back(std::make_unique<Connection>(endpoint_->port(), 4096));
    deaf.back()->Send(kGet);
  }
  EXPECT_TRUE(Answers());
  // Each had its second; whoever reads now gets what is on its way, and the end.
  for (const auto& connection : deaf) EXPECT_TRUE(connection->UntilClosed(30s).has_value());
}

TEST(MetricsWhileTest, AWedgedEngineIsStillScraped) {  // O6
  TestServer server;
  auto endpoint = MetricsEndpoint::Start("127.0.0.1:0", server.registry());
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  server.runner().CloseGate();
  std::future<Answer> answer = server.GenerateAsync(TextRequest("x", 5));
  server.runner().WaitUntilAtGate();
  for (int i = 0; i < 5; ++i) {
    const auto page = Exposition::Parse(HttpGet((*endpoint)->port(), "/metrics"));
    ASSERT_TRUE(page.ok()) << page.status();
    EXPECT_EQ(page->Sum("flashquant_streams_open"), 1);
  }
  server.runner().OpenGate();
  EXPECT_TRUE(answer.get().result.ok());
}

TEST(MetricsWhileTest, CountersGoBeyond32Bits) {  // S14
  prometheus::Registry registry;
  Metrics metrics(registry, "m", 64);
  constexpr int64_t kMany = int64_t{3} << 32;
  metrics.AddOutputTokens(kMany);
  metrics.AddOutputTokens(1);
  const auto page = Exposition::Parse(prometheus::TextSerializer().Serialize(registry.Collect()));
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(page->Sum("flashquant_output_tokens_total"), static_cast<double>(kMany + 1));
}

TEST_F(MetricsEndpointTest, OtherPathsAndMethodsGiveNoMetrics) {
  EXPECT_EQ(HttpGet(endpoint_->port(), "/"), "");
  EXPECT_EQ(HttpGet(endpoint_->port(), "/../etc/passwd"), "");
  Connection connection(endpoint_->port());
  connection.Send("\x16\x03\x01 not HTTP\r\n\r\n");
  EXPECT_TRUE(connection.UntilClosed(20s).has_value());
  EXPECT_TRUE(Answers());
}

}  // namespace
}  // namespace flashquant
