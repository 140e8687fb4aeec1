// What arrives from peers that do not keep to HTTP/2 or gRPC, written byte by byte: the server ends
// the connection or the call, and serves the next one. Ids in comments are rows of the reliability
// matrix.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/shutdown.h"
#include "tests/e2e/test_server.h"

namespace flashquant {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr char kGenerate[] = "/flashquant.v1.InferenceService/Generate";
constexpr uint8_t kData = 0, kHeaders = 1, kResetStream = 3, kSettings = 4, kPing = 6,
                  kContinuation = 9;
constexpr uint8_t kEndStream = 1, kEndHeaders = 4;

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload) {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame += static_cast<char>(payload.size() >> shift);
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  for (const int shift : {24, 16, 8, 0}) frame += static_cast<char>(stream >> shift);
  return frame + payload;
}

// An HPACK string: length with a prefix of 7 bits, no Huffman code.
std::string HpackString(const std::string& text) {
  std::string out;
  size_t size = text.size();
  if (size < 127) {
    out += static_cast<char>(size);
  } else {
    out += static_cast<char>(127);
    for (size -= 127; size >= 128; size /= 128) out += static_cast<char>(size % 128 + 128);
    out += static_cast<char>(size);
  }
  return out + text;
}

using Fields = std::vector<std::pair<std::string, std::string>>;

// HEADERS of a call, `more` replacing what has the same name.
std::string CallHeaders(uint32_t stream, uint8_t flags, const Fields& more = {}) {
  Fields fields = {{":method", "POST"},  {":scheme", "http"},
                   {":path", kGenerate}, {":authority", "localhost"},
                   {"te", "trailers"},   {"content-type", "application/grpc"}};
  for (const auto& field : more) {
    std::erase_if(fields, [&](const auto& other) { return other.first == field.first; });
    if (field.first[0] == ':') {
      fields.insert(fields.begin(), field);
    } else {
      fields.push_back(field);
    }
  }
  std::string block;
  for (const auto& [name, value] : fields) {
    block += '\0';  // literal, not indexed, new name
    block += HpackString(name) + HpackString(value);
  }
  return Frame(kHeaders, flags | kEndHeaders, stream, block);
}

class RawConnection {
 public:
  explicit RawConnection(const TestServer& server) : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const std::string target = server.target();
    address.sin_port =
        htons(static_cast<uint16_t>(std::stoi(target.substr(target.rfind(':') + 1))));
    EXPECT_EQ(connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~RawConnection() { close(socket_); }
  RawConnection(const RawConnection&) = delete;
  RawConnection& operator=(const RawConnection&) = delete;

  void OpenHttp2() { Send(kPreface + Frame(kSettings, 0, 0, "")); }
  // Whether everything was taken; a server may have closed before.
  bool Send(const std::string& bytes) {
    size_t sent = 0;
    while (sent < bytes.size()) {
      // What the server says meanwhile is taken, or both would wait.
      pollfd ready = {socket_, POLLIN | POLLOUT, 0};
      if (poll(&ready, 1, 10000) != 1) return false;
      if ((ready.revents & POLLIN) != 0 && !Receive()) return false;
      if ((ready.revents & POLLOUT) == 0) continue;
      const ssize_t n =
          send(socket_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n <= 0) return false;
      sent += static_cast<size_t>(n);
    }
    return true;
  }
  // Everything until the server closes; fails when it does not within twenty seconds.
  std::string UntilClosed() {
    const TimePoint end = std::chrono::steady_clock::now() + 20s;
    for (;;) {
      pollfd ready = {socket_, POLLIN, 0};
      if (poll(&ready, 1, 1000) == 1 && !Receive()) return received_;
      if (std::chrono::steady_clock::now() > end) {
        ADD_FAILURE() << "still open";
        return received_;
      }
    }
  }

 private:
  bool Receive() {
    char bytes[4096];
    const ssize_t n = recv(socket_, bytes, sizeof(bytes), 0);
    if (n <= 0) return false;
    received_.append(bytes, static_cast<size_t>(n));
    return true;
  }
  const int socket_;
  std::string received_;
};

class RawClientTest : public ::testing::Test {
 protected:
  void TearDown() override {
    // The server may still have thousands of resets to work through: seconds of processor time.
    EXPECT_TRUE(Eventually([&] { return server_.LeakCheck().empty(); }, 60s))
        << server_.LeakCheck();
    EXPECT_TRUE(server_.Generate(TextRequest("next", 2)).result.ok());
    EXPECT_EQ(server_.LeakCheck(), "");
  }
  TestServer server_;
};

TEST_F(RawClientTest, OtherProtocolsAreClosed) {  // N12
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), std::string(64, '\xfe'),
        std::string("\x16\x03\x01\x00\x05hello", 10), std::string("PRI * HTTP/1.0\r\n\r\n")}) {
    RawConnection connection(server_);
    connection.Send(bytes);
    connection.UntilClosed();
  }
}

TEST_F(RawClientTest, RapidResetsLeaveNothing) {  // N15
  RawConnection connection(server_);
  connection.OpenHttp2();
  const std::string cancel("\0\0\0\x08", 4);
  for (uint32_t call = 0; call < 5000; ++call) {
    const uint32_t stream = 2 * call + 1;
    if (!connection.Send(CallHeaders(stream, 0) + Frame(kResetStream, 0, stream, cancel))) break;
  }
}

TEST_F(RawClientTest, BadHeadersEndTheCallNotTheServer) {  // N16
  const std::vector<Fields> bad = {{{"te", "gzip"}},
                                   {{":scheme", "\x01weird"}},
                                   {{"grpclb_client_stats", "1"}},
                                   {{"x-bin", "!not base64!"}},
                                   {{"grpc-timeout", "soon"}},
                                   {{"grpc-timeout", "99999999999999999999S"}},
                                   {{"grpc-encoding", "rot13"}},
                                   {{"content-type", "text/plain"}},
                                   {{":method", "GET"}},
                                   {{":path", ""}}};
  for (const Fields& fields : bad) {
    for (const size_t padding : {size_t{0}, size_t{9000}}) {
      RawConnection connection(server_);
      connection.OpenHttp2();
      Fields all = fields;
      if (padding > 0) all.emplace_back("x-long", std::string(padding, 'x'));
      connection.Send(CallHeaders(1, 0, all) + Frame(kData, kEndStream, 1, std::string(5, '\0')));
    }
    EXPECT_TRUE(server_.Generate(TextRequest("x", 2)).result.ok()) << fields.front().first;
  }
}

TEST_F(RawClientTest, PingFloodIsToldToCalmDown) {  // N18
  RawConnection connection(server_);
  connection.OpenHttp2();
  for (int i = 0; i < 200; ++i) {
    if (!connection.Send(Frame(kPing, 0, 0, std::string(8, 'p')))) break;
  }
  EXPECT_THAT(connection.UntilClosed(), HasSubstr("too_many_pings"));
}

TEST_F(RawClientTest, CallThatNeverSendsItsMessageEndsWithItsConnection) {  // N2, N8
  RawConnection connection(server_);
  connection.OpenHttp2();
  // Half a message, and the end of the connection in its middle.
  connection.Send(CallHeaders(1, 0) + Frame(kData, 0, 1, std::string("\0\0\0\0\x64half", 9)));
}

TEST_F(RawClientTest, BrokenFramesEndTheConnection) {  // N8, R38
  for (const std::string& bytes :
       {Frame(kData, 0, 7, "data of no call"), Frame(kSettings, 0, 0, "odd"),
        Frame(kHeaders, kEndHeaders, 1, std::string("\xff\xff\xff\xff\xff\xff\xff\xff\xff", 9)),
        Frame(kHeaders, kEndHeaders, 2, "")}) {
    RawConnection connection(server_);
    connection.OpenHttp2();
    connection.Send(bytes);
  }
}

TEST_F(RawClientTest, ThousandsOfIdleConnectionsAreHeldAndOthersServed) {  // N10
  ASSERT_TRUE(RaiseOpenFileLimit().ok());
  constexpr int kNumConnections = 1500;  // both ends of each are in this process
  std::vector<std::unique_ptr<RawConnection>> idle;
  for (int i = 0; i < kNumConnections; ++i) {
    idle.push_back(std::make_unique<RawConnection>(server_));
    idle.back()->OpenHttp2();
  }
  EXPECT_TRUE(server_.Generate(TextRequest("beside", 5)).result.ok());
  EXPECT_EQ(server_.LeakCheck(), "");
  idle.clear();
}

TEST_F(RawClientTest, AHandshakeThatDoesNotEndIsCut) {  // N13
  RawConnection half(server_);
  half.Send(std::string(kPreface).substr(0, 10));
  RawConnection silent(server_);
  EXPECT_TRUE(server_.Generate(TextRequest("beside", 5)).result.ok());
  half.UntilClosed();  // within the ten seconds of a handshake
  silent.UntilClosed();
}

TEST_F(RawClientTest, AHeaderWithoutAnEndHoldsUpNobodyElse) {  // N14
  RawConnection endless(server_);
  endless.OpenHttp2();
  // A literal whose length is never reached, in continuation frames of 16 KiB.
  std::string begin(1, '\0');
  begin += HpackString("x-endless");
  begin += std::string("\x7f\xff\xff\xff\x07", 5);
  endless.Send(Frame(kHeaders, 0, 1, begin));
  std::future<Answer> beside = server_.GenerateAsync(TextRequest("beside", 50));
  for (int i = 0; i < 128; ++i) {
    if (!endless.Send(Frame(kContinuation, 0, 1, std::string(16384, 'x')))) break;
  }
  EXPECT_TRUE(beside.get().result.ok());
}

// The connection stays open and nothing is ever read or answered, as with a frozen process or a
// host that is gone.
TEST(KeepaliveTest, ClientThatAnswersNoPingIsCutAndItsCallEnds) {  // N2, N7
  TestServerOptions options;
  options.server.keepalive = 1s;
  options.server.keepalive_timeout = 1s;
  TestServer server(options);
  server.runner().CloseGate();
  RawConnection connection(server);
  connection.OpenHttp2();
  const std::string message = TextRequest("frozen", 50).SerializeAsString();
  connection.Send(CallHeaders(1, 0) +
                  Frame(kData, kEndStream, 1,
                        std::string("\0\0\0\0", 4) + static_cast<char>(message.size()) + message));
  ASSERT_TRUE(Eventually([&] { return server.server().live_calls() == 1; }));
  server.runner().WaitUntilAtGate();
  connection.UntilClosed();
  server.runner().OpenGate();
  EXPECT_EQ(server.LeakCheck(), "");
  EXPECT_EQ(server.Scrape().Sum("flashquant_requests_finished_total", {{"code", "CANCELLED"}}), 1);
}

TEST(StreamLimitTest, CallsOverTheLimitOfAConnectionWaitInTheClient) {  // N9
  TestServerOptions options;
  options.server.max_streams_per_connection = 2;
  TestServer server(options);
  server.runner().CloseGate();
  InferenceClient client(server.target());
  std::vector<std::future<CallResult>> calls;
  for (int i = 0; i < 6; ++i) {
    calls.push_back(std::async(std::launch::async, [&client, i] {
      return client.Generate(TextRequest("call", 5, static_cast<uint64_t>(i)),
                             [](const v1::GenerateResponse&) { return true; });
    }));
  }
  ASSERT_TRUE(Eventually([&] { return server.server().live_calls() == 2; }));
  server.runner().WaitUntilAtGate();
  EXPECT_EQ(server.server().live_calls(), 2);
  server.runner().OpenGate();
  for (std::future<CallResult>& call : calls) EXPECT_TRUE(call.get().ok());
  EXPECT_EQ(server.LeakCheck(), "");
}

}  // namespace
}  // namespace flashquant
