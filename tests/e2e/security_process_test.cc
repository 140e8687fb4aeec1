// Security and watchdogs of the program as its user sees it: flags, files, signals, exit codes, and
// that no secret comes out anywhere. Ids in comments are rows of the reliability matrix.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>

#include "engine/base/exit_code.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/token_file.h"
#include "tests/e2e/server_process.h"
#include "tests/support/test_certificates.h"

namespace flashquant {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

constexpr char kDemoModel[] = "deploy/demo-model";

class SecureServerTest : public ::testing::Test {
 protected:
  void WriteCertificates() {
    const CertificateAndKey pair = MakeCertificate(ca_);
    cert_ = WriteTestFile("cert.pem", pair.cert);
    key_ = WriteTestFile("key.pem", pair.key);
    ca_file_ = WriteTestFile("ca.pem", ca_.cert);
  }
  ClientSecurity Client() const {
    ClientSecurity security;
    security.tls = true;
    security.ca_pem = ca_.cert;
    return security;
  }

  const CertificateAndKey ca_ = MakeCa();
  std::string cert_, key_, ca_file_;
};

TEST_F(SecureServerTest, CommandsReachAServerWithTlsAndTokens) {
  WriteCertificates();
  Process made({"token", "alice"});
  ASSERT_EQ(made.Wait(), 0) << made.err();
  const std::string tokens = WriteTestFile("tokens", made.out());
  const size_t at = made.err().find("fq_");
  ASSERT_NE(at, std::string::npos) << made.err();
  const std::string token = WriteTestFile("token", made.err().substr(at));
  ServeProcess serve(
      {"--model", kDemoModel, "--tls-cert", cert_, "--tls-key", key_, "--token-file", tokens});
  ASSERT_TRUE(serve.WaitUntilServing(Client())) << serve.err();
  EXPECT_THAT(serve.err(), HasSubstr("(TLS, tokens)"));

  Process health({"health", "--target", serve.target(), "--tls-ca", ca_file_});
  EXPECT_EQ(health.Wait(), 0) << health.err();
  const std::vector<std::string> generate = {"generate",         "--target",     serve.target(),
                                             "--tls-ca",         ca_file_,       "--prompt",
                                             "Once upon a time", "--max-tokens", "4"};
  std::vector<std::string> with_token = generate;
  with_token.insert(with_token.end(), {"--token-file", token});
  Process good(with_token);
  EXPECT_EQ(good.Wait(), 0) << good.err();
  EXPECT_NE(good.out(), "");
  Process without(generate);
  EXPECT_NE(without.Wait(), 0);
  EXPECT_THAT(without.err(), HasSubstr("UNAUTHENTICATED: CREDENTIALS_MISSING: credentials required"
                                       "\n  give --token-file FILE"));
  Process plain({"generate", "--target", serve.target(), "--prompt", "x", "--timeout", "20"});
  EXPECT_EQ(plain.Wait(), kExitUnavailable);
  EXPECT_THAT(plain.err(), HasSubstr("--tls-ca"));
}

TEST_F(SecureServerTest, ClientsTakeTlsAndTokenFromVariablesToo) {
  WriteCertificates();
  const std::string tokens = WriteTestFile("tokens", *TokenLine("a", "the-token", ""));
  const std::string token = WriteTestFile("token", "the-token\n");
  ASSERT_EQ(setenv("FLASHQUANT_CLIENT_TLS_CA", ca_file_.c_str(), 1), 0);
  ASSERT_EQ(setenv("FLASHQUANT_CLIENT_TOKEN_FILE", token.c_str(), 1), 0);
  ServeProcess serve(
      {"--model", kDemoModel, "--tls-cert", cert_, "--tls-key", key_, "--token-file", tokens});
  ASSERT_TRUE(serve.WaitUntilServing(Client())) << serve.err();
  EXPECT_THAT(serve.err(), Not(HasSubstr("FLASHQUANT_CLIENT")));  // no warning about them
  const std::vector<std::string> generate = {
      "generate", "--target", serve.target(), "--prompt", "Once", "--max-tokens", "2"};
  Process good(generate);
  EXPECT_EQ(good.Wait(), 0) << good.err();
  // A flag comes before its variable.
  std::vector<std::string> other = generate;
  other.insert(other.end(), {"--token-file", WriteTestFile("other", "another-token\n")});
  Process bad(other);
  EXPECT_NE(bad.Wait(), 0);
  EXPECT_THAT(bad.err(), HasSubstr("CREDENTIALS_INVALID"));
  unsetenv("FLASHQUANT_CLIENT_TLS_CA");
  unsetenv("FLASHQUANT_CLIENT_TOKEN_FILE");
}

// What an image's health check does: the options of the server in place of flags.
TEST_F(SecureServerTest, LocalHealthCheckFollowsTheServersPortAndTls) {
  WriteCertificates();
  const auto health = [](const ServeProcess& serve, const nlohmann::json& tls,
                         const std::vector<std::string>& more) {
    const std::string port = serve.target().substr(serve.target().rfind(':'));
    const nlohmann::json config = {
        {"listen", {{"address", "0.0.0.0" + port}, {"insecure_bind", true}}}, {"tls", tls}};
    std::vector<std::string> arguments = {"health", "--local", "--config",
                                          WriteTestFile("local.json", config.dump())};
    arguments.insert(arguments.end(), more.begin(), more.end());
    Process process(arguments);
    const int code = process.Wait();
    EXPECT_TRUE(code == 0 || !process.err().empty());
    return code;
  };
  const nlohmann::json tls = {{"cert_file", cert_}, {"key_file", key_}};
  nlohmann::json mutual_tls = tls;
  mutual_tls["client_ca_file"] = ca_file_;
  {
    ServeProcess serve({"--model", kDemoModel});
    ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
    EXPECT_EQ(health(serve, nlohmann::json::object(), {}), 0);
    EXPECT_EQ(health(serve, tls, {"--timeout", "2"}), kExitUnavailable);
  }
  {
    ServeProcess serve({"--model", kDemoModel, "--tls-cert", cert_, "--tls-key", key_});
    ASSERT_TRUE(serve.WaitUntilServing(Client())) << serve.err();
    EXPECT_EQ(health(serve, tls, {}), 0);
    EXPECT_EQ(health(serve, nlohmann::json::object(), {"--timeout", "2"}), kExitUnavailable);
  }
  // The server's own certificate where its CA is the clients' too, else one that is given.
  ServeProcess serve(
      {"--model", kDemoModel, "--tls-cert", cert_, "--tls-key", key_, "--tls-client-ca", ca_file_});
  ClientSecurity client = Client();
  const CertificateAndKey pair = MakeCertificate(ca_);
  client.cert_pem = pair.cert;
  client.key_pem = pair.key;
  ASSERT_TRUE(serve.WaitUntilServing(client)) << serve.err();
  EXPECT_EQ(health(serve, mutual_tls, {}), 0);
  const CertificateAndKey stranger = MakeCertificate(MakeCa());
  const std::string cert = WriteTestFile("stranger.pem", stranger.cert);
  const std::string key = WriteTestFile("stranger_key.pem", stranger.key);
  EXPECT_EQ(health(serve, mutual_tls, {"--tls-cert", cert, "--tls-key", key, "--timeout", "2"}),
            kExitUnavailable);
}

TEST_F(SecureServerTest, SighupTakesNewFilesAndKeepsOldOnesThatWere) {  // L6
  WriteCertificates();
  const std::string tokens = WriteTestFile("tokens", *TokenLine("a", "the-first-token", ""));
  ServeProcess serve({"--tls-cert", cert_, "--tls-key", key_, "--token-file", tokens});
  ASSERT_TRUE(serve.WaitUntilServing(Client())) << serve.err();
  const auto code_with = [&](const char* token) {
    ClientSecurity security = Client();
    security.token = token;
    v1::GetModelResponse model;
    return InferenceClient(serve.target(), security).GetModel({}, &model).code;
  };
  EXPECT_EQ(code_with("the-first-token"), 0);
  WriteTestFile("tokens", "damaged-secret");
  serve.Signal(SIGHUP);
  ASSERT_TRUE(Eventually([&] { return NumberAfter(serve.err(), tokens + ":") == 1; }))
      << serve.err();
  EXPECT_THAT(serve.err(), HasSubstr("the old certificates and tokens stay in use"));
  EXPECT_THAT(serve.err(), Not(HasSubstr("damaged-secret")));
  EXPECT_EQ(code_with("the-first-token"), 0);
  WriteTestFile("tokens", *TokenLine("b", "the-second-token", ""));
  serve.Signal(SIGHUP);
  ASSERT_TRUE(Eventually([&] { return code_with("the-second-token") == 0; })) << serve.err();
  EXPECT_EQ(code_with("the-first-token"), 16);
}

TEST_F(SecureServerTest, BadFilesStopTheStartWithTheirExitCode) {  // C5, C6, C7
  WriteCertificates();
  const auto expect = [](std::vector<std::string> flags, int code, const std::string& text) {
    std::vector<std::string> arguments = {"serve", "--model",     kDemoModel, "--metrics-listen",
                                          "off",   "--log-level", "error"};
    if (std::find(flags.begin(), flags.end(), "--listen") == flags.end()) {
      arguments.insert(arguments.end(), {"--listen", "127.0.0.1:0"});
    }
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    Process process(arguments);
    EXPECT_EQ(process.Wait(), code) << text;
    EXPECT_THAT(process.err(), HasSubstr(text));
    const std::string err = process.err();
    EXPECT_EQ(std::count(err.begin(), err.end(), '\n'), 1) << err;
  };
  const std::string other_key = WriteTestFile("other.pem", MakeCertificate(ca_).key);
  const std::string open = WriteTestFile("open", *TokenLine("a", "x", ""), 0644);
  expect({"--tls-cert", cert_, "--tls-key", "no/key.pem"}, kExitNoInput, "no/key.pem");
  expect({"--tls-cert", cert_}, kExitBadConfig, "give both (--tls-cert, --tls-key)");
  expect({"--tls-cert", cert_, "--tls-key", other_key}, kExitBadConfig, "is not the key");
  expect({"--token-file", open}, kExitBadConfig, "mode 0644 lets others at the tokens");
  expect({"--token-file", "no/tokens"}, kExitNoInput, "no/tokens");
  expect({"--listen", "0.0.0.0:0"}, kExitBadConfig, "(plain text, no credentials)");
  expect({"--listen", "0.0.0.0:0", "--tls-cert", cert_, "--tls-key", key_}, kExitBadConfig,
         "refusing insecure bind to 0.0.0.0:0 (no credentials): give --token-file or "
         "--tls-client-ca");
}

TEST_F(SecureServerTest, SecureBindNeedsNoLeave) {  // C5
  WriteCertificates();
  ServeProcess serve({"--listen", "0.0.0.0:0", "--tls-cert", cert_, "--tls-key", key_,
                      "--tls-client-ca", ca_file_});
  EXPECT_THAT(serve.err(), HasSubstr("(mutual TLS)"));
}

// Strings that must come out nowhere but in the answer: prompt, token, and paths.
TEST_F(SecureServerTest, CanariesAppearInNoLogMetricOrError) {  // O8
  const std::string prompt = "CANARY-PROMPT-7f3a", token = "CANARY-TOKEN-91bc-0123456789abcdef",
                    path = "canary-path-55d0";
  const std::string tokens = WriteTestFile(path, *TokenLine("a", token, ""));
  ServeProcess serve(
      {"--model", kDemoModel, "--token-file", tokens, "--log-level", "debug", "--reflection"});
  ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
  std::string told;  // everything that clients are told, answers excepted
  const auto note = [&](const CallResult& result) {
    told += result.message + "\n" + result.reason + "\n";
    for (const auto& [key, value] : result.metadata) told += key + "=" + value + "\n";
    for (const std::string& violation : result.violations) told += violation + "\n";
  };
  const auto generate = [&](const v1::GenerateRequest& request, const std::string& bearer) {
    ClientSecurity security;
    security.token = bearer;
    InferenceClient client(serve.target(), security);
    note(client.Generate(request, [](const v1::GenerateResponse&) { return true; }));
  };
  v1::GenerateRequest good;
  good.set_text(prompt);
  good.mutable_stop()->set_max_output_tokens(3);
  generate(good, token);
  generate(good, token + "x");
  generate(good, "two words " + token);
  std::vector<v1::GenerateRequest> bad(8, good);
  bad[0].set_text(prompt + std::string(2 << 20, 'x'));
  bad[1].set_request_id(prompt + " \n");
  bad[2].mutable_stop()->add_sequences(prompt + std::string(200, 'x'));
  bad[3].mutable_sampling()->set_temperature(-1);
  bad[4].set_cache_salt(prompt + std::string(200, 'x'));
  bad[5].mutable_chat()->add_messages()->set_role(prompt);
  bad[6].mutable_stop()->set_max_output_tokens(1 << 20);
  for (int i = 0; i < 5000; ++i) bad[7].mutable_text()->append(prompt);
  for (const v1::GenerateRequest& request : bad) generate(request, token);
  ClientSecurity security;
  security.token = token;
  InferenceClient client(serve.target(), security);
  note(client.CallRaw("/flashquant.v1.InferenceService/Generate", "\x1a\xff" + prompt, nullptr));
  note(client.CallRaw("/" + prompt + "/" + prompt, prompt, nullptr));
  serve.Signal(SIGUSR1);
  ASSERT_TRUE(Eventually([&] { return serve.err().find("state: ") != std::string::npos; }))
      << serve.err();
  const std::string metrics = HttpGet(serve.metrics_port(), "/metrics");
  ASSERT_THAT(metrics, HasSubstr("flashquant_auth_failures_total"));
  serve.Signal(SIGTERM);
  EXPECT_EQ(serve.Wait(), 0) << serve.err();
  for (const std::string& secret : {prompt, token}) {
    EXPECT_THAT(serve.err(), Not(HasSubstr(secret)));
    EXPECT_THAT(serve.out(), Not(HasSubstr(secret)));
  }
  for (const std::string& secret : {prompt, token, path}) {
    EXPECT_THAT(told, Not(HasSubstr(secret)));
    EXPECT_THAT(metrics, Not(HasSubstr(secret)));
  }
}

// A prompt in one step takes far longer than the limit that is given here.
TEST(WatchdogProcessTest, StuckStepEndsCallsAndTheProcess) {  // S16
  ServeProcess serve({"--model", kDemoModel, "--stuck-step-seconds", "0.02", "--token-budget",
                      "4096", "--threads", "1"});
  ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
  v1::GenerateRequest request;
  for (int i = 0; i < 480; ++i) request.mutable_token_ids()->add_ids(5);
  request.mutable_stop()->set_max_output_tokens(2);
  const CallResult result =
      InferenceClient(serve.target()).Generate(request, [](const v1::GenerateResponse&) {
        return true;
      });
  EXPECT_EQ(result.code, 14) << result.message;
  EXPECT_EQ(result.reason, "ENGINE_FAILED");
  EXPECT_EQ(serve.Wait(), kExitInternal);
  EXPECT_THAT(serve.err(), HasSubstr("engine failed: a step takes longer than 0.02 s"));
  EXPECT_THAT(serve.err(), HasSubstr("state: "));
}

TEST(WatchdogProcessTest, ListenerThatWentDeafEndsTheProcess) {  // N11
  ServeProcess serve({"--probe-seconds", "1"});
  ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
  size_t open = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(serve.pid()) + "/fd")) {
    ++open;
  }
  const rlimit few = {open + 8, open + 8};
  ASSERT_EQ(prlimit(serve.pid(), RLIMIT_NOFILE, &few, nullptr), 0);
  std::vector<int> connections;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(serve.port()));
  for (int i = 0; i < 100; ++i) {
    connections.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    connect(connections.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address));
  }
  EXPECT_EQ(serve.Wait(30s), kExitSystem) << serve.err();
  EXPECT_THAT(serve.err(), HasSubstr("the listener does not answer its own process"));
  for (const int connection : connections) close(connection);
}

TEST(WatchdogProcessTest, StoppedAndContinuedProcessServesOn) {  // L8
  ServeProcess serve({"--model", kDemoModel, "--stuck-step-seconds", "2", "--probe-seconds", "1"});
  ASSERT_TRUE(serve.WaitUntilServing()) << serve.err();
  serve.Signal(SIGSTOP);
  const TimePoint later = std::chrono::steady_clock::now() + 4s;
  Eventually([&] { return std::chrono::steady_clock::now() >= later; });
  serve.Signal(SIGCONT);
  v1::GenerateRequest request;
  request.set_text("Once upon a time");
  request.mutable_stop()->set_max_output_tokens(4);
  EXPECT_TRUE(InferenceClient(serve.target())
                  .Generate(request, [](const v1::GenerateResponse&) { return true; })
                  .ok());
  serve.Signal(SIGTERM);
  EXPECT_EQ(serve.Wait(), 0) << serve.err();
}

}  // namespace
}  // namespace flashquant
