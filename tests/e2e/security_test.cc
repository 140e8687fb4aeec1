// Who may call: tokens on every method, TLS and client certificates, reload, and the end of calls
// whose engine hangs. Ids in comments are rows of the reliability matrix.
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <chrono>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "gtest/gtest.h"
#include "server/listener_probe.h"
#include "server/watchdog.h"
#include "tests/e2e/test_server.h"
#include "tests/support/test_certificates.h"

namespace flashquant {
namespace {

using ::testing::IsEmpty;

using namespace std::chrono_literals;

constexpr int kResourceExhausted = 8, kUnimplemented = 12, kUnavailable = 14, kUnauthenticated = 16;
constexpr char kToken[] = "fq_0123456789abcdefghijklmnopqrstuvwxyz";
constexpr char kReflection[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

CallOptions WithHeader(std::vector<std::string> values) {
  CallOptions options;
  for (std::string& value : values) {
    options.metadata.emplace_back("authorization", std::move(value));
  }
  return options;
}

// A server that asks for kToken; "old" has expired.
class TokenTest : public ::testing::Test {
 protected:
  TokenTest() {
    const std::string lines =
        *TokenLine("alice", kToken, "") + "\n" + *TokenLine("old", "expired-token", "2020-01-01");
    security_ = *ServerSecurity::Load({{}, WriteTestFile("tokens", lines)});
    TestServerOptions options;
    options.server.reflection = true;
    options.server.security = security_.get();
    options.client.token = kToken;
    server_ = std::make_unique<TestServer>(options);
  }
  void TearDown() override { EXPECT_EQ(server_->LeakCheck(), ""); }

  std::unique_ptr<ServerSecurity> security_;
  std::unique_ptr<TestServer> server_;
};

TEST_F(TokenTest, GoodTokenIsServed) {
  EXPECT_TRUE(server_->Generate(TextRequest("x", 3)).result.ok());
}

TEST_F(TokenTest, EveryWrongTokenGivesTheSameAnswer) {  // N19
  InferenceClient anybody(server_->target());
  const CallResult missing = anybody.GetModel({}, nullptr, {});
  EXPECT_EQ(missing.code, kUnauthenticated);
  EXPECT_EQ(missing.reason, "CREDENTIALS_MISSING");
  EXPECT_EQ(missing.message, "credentials required");
  const std::string good = std::string("Bearer ") + kToken;
  std::string almost = good;
  almost.back() ^= 1;
  const std::vector<std::vector<std::string>> wrong = {{"Bearer wrong"},
                                                       {almost},
                                                       {good + "x"},
                                                       {good.substr(0, good.size() - 1)},
                                                       {"Bearer expired-token"},
                                                       {kToken},
                                                       {"Basic " + std::string(kToken)},
                                                       {good, good},
                                                       {"Bearer "},
                                                       {"Bearer " + std::string(4500, 'x')}};
  for (const auto& headers : wrong) {
    v1::GetModelResponse response;
    const CallResult result = anybody.GetModel({}, &response, WithHeader(headers));
    EXPECT_EQ(result.code, kUnauthenticated) << headers.front();
    EXPECT_EQ(result.reason, "CREDENTIALS_INVALID") << headers.front();
    EXPECT_EQ(result.message, "credentials required") << headers.front();
    EXPECT_THAT(result.metadata, IsEmpty());
  }
  // The library's own limit of all headers.
  v1::GetModelResponse response;
  EXPECT_EQ(
      anybody.GetModel({}, &response, WithHeader({"Bearer " + std::string(1 << 20, 'x')})).code,
      kResourceExhausted);
  const Exposition metrics = server_->Scrape();
  const auto failures = [&](const char* reason) {
    return metrics.Sum("flashquant_auth_failures_total", {{"reason", reason}});
  };
  EXPECT_EQ(failures("missing"), 1);
  EXPECT_EQ(failures("expired"), 1);
  EXPECT_EQ(failures("unknown"), 4);
  EXPECT_EQ(failures("malformed"), 5);
  EXPECT_EQ(metrics.Sum("flashquant_requests_rejected_total", {{"reason", "unauthenticated"}}), 11);
}

// Every method of every service that reflection lists, from the descriptors: a method that is added
// one day is tried too.
TEST_F(TokenTest, NoMethodAnswersWithoutAToken) {  // N20
  ClientSecurity security;
  security.token = kToken;
  InferenceClient alice(server_->target(), security);
  grpc::reflection::v1alpha::ServerReflectionRequest list;
  list.set_list_services("");
  std::string bytes;
  ASSERT_TRUE(alice.CallRaw(kReflection, list.SerializeAsString(), &bytes).ok());
  grpc::reflection::v1alpha::ServerReflectionResponse services;
  ASSERT_TRUE(services.ParseFromString(bytes));
  std::vector<std::string> methods = {"/flashquant.v1.InferenceService/NoSuchMethod",
                                      "/no.such.Service/Method", "/"};
  for (const auto& service : services.list_services_response().service()) {
    const auto* descriptor =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(service.name());
    ASSERT_NE(descriptor, nullptr) << service.name();
    for (int i = 0; i < descriptor->method_count(); ++i) {
      methods.push_back(fmt::format("/{}/{}", service.name(), descriptor->method(i)->name()));
    }
  }
  ASSERT_GE(methods.size(), 9u);  // five of ours, reflection, and the three that do not exist
  InferenceClient anybody(server_->target());
  for (const std::string& method : methods) {
    const CallResult result = anybody.CallRaw(method, "", &bytes);
    EXPECT_EQ(result.code, kUnauthenticated) << method;
    EXPECT_EQ(result.reason, "CREDENTIALS_MISSING") << method;
  }
  EXPECT_EQ(anybody.Health(""), HealthState::kServing);
  EXPECT_EQ(alice.CallRaw(methods.front(), "", &bytes).code, kUnimplemented);
  const Exposition metrics = server_->Scrape();
  EXPECT_EQ(metrics.Sum("flashquant_generations_finished_total"), 0);
}

TEST_F(TokenTest, ReflectionGivesFilesAndNamesWhatItLacks) {
  ClientSecurity security;
  security.token = kToken;
  InferenceClient alice(server_->target(), security);
  grpc::reflection::v1alpha::ServerReflectionRequest request;
  request.set_file_containing_symbol("flashquant.v1.InferenceService.Generate");
  std::string bytes;
  ASSERT_TRUE(alice.CallRaw(kReflection, request.SerializeAsString(), &bytes).ok());
  grpc::reflection::v1alpha::ServerReflectionResponse response;
  ASSERT_TRUE(response.ParseFromString(bytes));
  // The service's file, that of its messages, and what these import.
  EXPECT_GE(response.file_descriptor_response().file_descriptor_proto_size(), 3);
  for (const char* unknown : {"", "no.such.Symbol"}) {
    request.set_file_containing_symbol(unknown);
    ASSERT_TRUE(alice.CallRaw(kReflection, request.SerializeAsString(), &bytes).ok());
    ASSERT_TRUE(response.ParseFromString(bytes));
    EXPECT_EQ(response.error_response().error_code(), 5) << unknown;
  }
}

TEST_F(TokenTest, ReloadedTokensCountAtOnce) {  // L6
  WriteTestFile("tokens", *TokenLine("bob", "another-token-altogether", ""));
  ASSERT_TRUE(security_->Reload().ok());
  EXPECT_EQ(server_->Generate(TextRequest("x", 3)).result.code, kUnauthenticated);
  ClientSecurity bob;
  bob.token = "another-token-altogether";
  v1::GetModelResponse model;
  EXPECT_TRUE(InferenceClient(server_->target(), bob).GetModel({}, &model).ok());
  WriteTestFile("tokens", "nothing good");
  EXPECT_FALSE(security_->Reload().ok());
  EXPECT_TRUE(InferenceClient(server_->target(), bob).GetModel({}, &model).ok());
}

class TlsTest : public ::testing::Test {
 protected:
  TestServer& Start(bool client_certificates) {
    const CertificateAndKey pair = MakeCertificate(ca_);
    SecurityPaths paths;
    paths.tls.cert = WriteTestFile("cert.pem", pair.cert);
    paths.tls.key = WriteTestFile("key.pem", pair.key);
    if (client_certificates) paths.tls.client_ca = WriteTestFile("client_ca.pem", client_ca_.cert);
    auto security = ServerSecurity::Load(paths);
    EXPECT_TRUE(security.ok()) << security.status();
    security_ = *std::move(security);
    TestServerOptions options;
    options.server.security = security_.get();
    options.client =
        Client(ca_, client_certificates ? MakeCertificate(client_ca_) : CertificateAndKey());
    server_ = std::make_unique<TestServer>(options);
    return *server_;
  }
  static ClientSecurity Client(const CertificateAndKey& ca, const CertificateAndKey& own = {}) {
    ClientSecurity security;
    security.tls = true;
    security.ca_pem = ca.cert;
    security.cert_pem = own.cert;
    security.key_pem = own.key;
    return security;
  }
  int CodeFor(const ClientSecurity& security) {
    v1::GetModelResponse model;
    return InferenceClient(server_->target(), security).GetModel({}, &model, {.timeout = 20s}).code;
  }

  const CertificateAndKey ca_ = MakeCa();
  const CertificateAndKey client_ca_ = MakeCa({.name = "client CA"});
  std::unique_ptr<ServerSecurity> security_;
  std::unique_ptr<TestServer> server_;
};

TEST_F(TlsTest, EncryptedStreamIsTheSame) {
  Start(false);
  const Answer answer = server_->Generate(TextRequest("hello", 20));
  ASSERT_TRUE(answer.result.ok()) << answer.result.message;
  EXPECT_EQ(answer.ids.size(), 20u);
  EXPECT_EQ(server_->LeakCheck(), "");
}

TEST_F(TlsTest, BrokenHandshakesFailAndTheServiceGoesOn) {  // N12, N21
  Start(false);
  EXPECT_EQ(CodeFor(Client(MakeCa())), kUnavailable);  // wrong CA
  ClientSecurity other_name = Client(ca_);
  other_name.server_name = "other.example";
  EXPECT_EQ(CodeFor(other_name), kUnavailable);
  EXPECT_EQ(CodeFor({}), kUnavailable);  // plain text to a TLS port
  EXPECT_EQ(CodeFor(Client(ca_)), 0);
  TestServer plain;
  v1::GetModelResponse model;
  EXPECT_EQ(
      InferenceClient(plain.target(), Client(ca_)).GetModel({}, &model, {.timeout = 20s}).code,
      kUnavailable);  // and the reverse
  EXPECT_TRUE(plain.Generate(TextRequest("x", 2)).result.ok());
}

TEST_F(TlsTest, ClientsNeedACertificateOfTheirCa) {  // N21
  Start(true);
  EXPECT_TRUE(server_->Generate(TextRequest("x", 2)).result.ok());
  EXPECT_EQ(CodeFor(Client(ca_)), kUnavailable);                        // none
  EXPECT_EQ(CodeFor(Client(ca_, MakeCertificate(ca_))), kUnavailable);  // of another CA
  EXPECT_EQ(CodeFor(Client(ca_, MakeCertificate(client_ca_, {.valid_from_seconds = -7200,
                                                             .valid_to_seconds = -3600}))),
            kUnavailable);  // expired
  EXPECT_TRUE(server_->Generate(TextRequest("x", 2)).result.ok());
}

// The newest version that the server agrees to with a client that offers up to `max`; 0 when the
// handshake fails.
int NegotiatedVersion(int port, int max) {
  SSL_CTX* context = SSL_CTX_new(TLS_client_method());
  SSL_CTX_set_security_level(context, 0);  // else OpenSSL would not offer old versions at all
  SSL_CTX_set_min_proto_version(context, TLS1_VERSION);
  SSL_CTX_set_max_proto_version(context, max);
  BIO* bio = BIO_new_connect(fmt::format("127.0.0.1:{}", port).c_str());
  EXPECT_EQ(BIO_do_connect(bio), 1);
  SSL* tls = SSL_new(context);
  SSL_set_bio(tls, bio, bio);
  constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  SSL_set_alpn_protos(tls, kHttp2, sizeof(kHttp2));
  const int version = SSL_connect(tls) == 1 ? SSL_version(tls) : 0;
  SSL_free(tls);
  SSL_CTX_free(context);
  return version;
}

TEST_F(TlsTest, OldVersionsAreRefused) {  // N21
  Start(false);
  EXPECT_EQ(NegotiatedVersion(server_->server().port(), TLS1_VERSION), 0);
  EXPECT_EQ(NegotiatedVersion(server_->server().port(), TLS1_1_VERSION), 0);
  EXPECT_EQ(NegotiatedVersion(server_->server().port(), TLS1_2_VERSION), TLS1_2_VERSION);
  EXPECT_EQ(NegotiatedVersion(server_->server().port(), TLS1_3_VERSION), TLS1_3_VERSION);
}

TEST_F(TlsTest, NewCertificatesServeNewConnectionsAndOldOnesLiveOn) {  // L6
  Start(false);
  InferenceClient old_connection(server_->target(), Client(ca_));
  v1::GetModelResponse model;
  ASSERT_TRUE(old_connection.GetModel({}, &model).ok());
  const CertificateAndKey new_ca = MakeCa({.name = "new CA"});
  const CertificateAndKey pair = MakeCertificate(new_ca);
  WriteTestFile("cert.pem", pair.cert);
  EXPECT_FALSE(security_->Reload().ok());  // the key does not match yet
  EXPECT_EQ(CodeFor(Client(ca_)), 0);
  WriteTestFile("key.pem", pair.key);
  ASSERT_TRUE(security_->Reload().ok());
  EXPECT_EQ(CodeFor(Client(new_ca)), 0);
  EXPECT_EQ(CodeFor(Client(ca_)), kUnavailable);
  EXPECT_TRUE(old_connection.GetModel({}, &model).ok());
}

TEST_F(TlsTest, ProbeKnowsALivingListener) {  // N11
  Start(true);
  EXPECT_TRUE(ListenerAnswers("127.0.0.1", server_->server().port(), true, 10s));
  TestServer plain;
  EXPECT_TRUE(ListenerAnswers("0.0.0.0", plain.server().port(), false, 10s));
  EXPECT_TRUE(ListenerAnswers("localhost", plain.server().port(), false, 10s));
  // The probe of a listener that speaks the other language gets its complaint or nothing.
  EXPECT_TRUE(plain.Generate(TextRequest("x", 2)).result.ok());
}

// What the watchdog of serve does, with a step that hangs as long as the test wants.
TEST(StuckEngineTest, CallsAreEndedByTheServerItself) {  // S16, G7
  TestServerOptions options;
  options.engine.max_sequences = 1;
  TestServer server(options);
  server.runner().CloseGate();
  std::future<Answer> running = server.GenerateAsync(TextRequest("running", 30));
  server.runner().WaitUntilAtGate();
  std::future<Answer> waiting = server.GenerateAsync(TextRequest("waiting", 30));
  std::atomic<bool> stuck{false};
  StuckStepDetector detector(100ms, 5ms);
  PeriodicCheck check(5ms, [&] {
    stuck.store(detector.Look(server.engine().progress(), std::chrono::steady_clock::now()));
    return stuck.load();
  });
  ASSERT_TRUE(Eventually([&] { return stuck.load(); }));
  ASSERT_TRUE(Eventually([&] { return server.server().live_calls() == 2; }));
  server.server().SetFailed();
  server.server().EndAllCalls();
  for (std::future<Answer>* answer : {&running, &waiting}) {
    const Answer ended = answer->get();
    EXPECT_EQ(ended.result.code, kUnavailable);
    EXPECT_EQ(ended.result.reason, "ENGINE_FAILED");
  }
  EXPECT_EQ(InferenceClient(server.target()).Health(""), HealthState::kNotServing);
  EXPECT_TRUE(server.server().WaitUntilNoCalls(std::chrono::steady_clock::now() + 10s));
  // A call that comes in between is refused, or ended like the others.
  EXPECT_EQ(server.Generate(TextRequest("late", 3)).result.reason, "ENGINE_FAILED");
}

}  // namespace
}  // namespace flashquant
