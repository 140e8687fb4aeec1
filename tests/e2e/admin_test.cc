// AdminService on its own port: what it shows, what it does, and who may call it.
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "flashquant/v1/admin_service.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "gtest/gtest.h"
#include "server/token_file.h"
#include "tests/e2e/test_server.h"
#include "tests/support/test_certificates.h"

namespace flashquant {
namespace {

using ::testing::HasSubstr;

constexpr int kCancelled = 1, kNotFound = 5, kUnimplemented = 12, kUnavailable = 14,
              kUnauthenticated = 16;

TestServerOptions WithAdmin() {
  TestServerOptions options;
  options.server.admin_address = "127.0.0.1:0";
  return options;
}

// The calls of an operator.
class Operator {
 public:
  explicit Operator(TestServer& server)
      : target_("127.0.0.1:" + std::to_string(server.server().admin_port())),
        stub_(v1::AdminService::NewStub(MakeClientChannel(target_, {}))) {}

  const std::string& target() const { return target_; }
  v1::GetEngineStatsResponse Stats() {
    v1::GetEngineStatsResponse response;
    Expect([&](auto* context) { return stub_->GetEngineStats(context, {}, &response); });
    return response;
  }
  std::vector<v1::OpenRequest> List() {
    v1::ListRequestsResponse response;
    Expect([&](auto* context) { return stub_->ListRequests(context, {}, &response); });
    return {response.requests().begin(), response.requests().end()};
  }
  v1::ServingState SetDrain(bool drain) {
    v1::SetDrainRequest request;
    request.set_drain(drain);
    v1::SetDrainResponse response;
    Expect([&](auto* context) { return stub_->SetDrain(context, request, &response); });
    return response.state();
  }
  CallResult Cancel(const std::string& id) {
    v1::CancelRequestRequest request;
    request.set_request_id(id);
    v1::CancelRequestResponse response;
    grpc::ClientContext context;
    return ToCallResult(stub_->CancelRequest(&context, request, &response));
  }
  void ResetPrefixCache() {
    v1::ResetPrefixCacheResponse response;
    Expect([&](auto* context) { return stub_->ResetPrefixCache(context, {}, &response); });
  }

 private:
  template <typename Call>
  void Expect(const Call& call) {
    grpc::ClientContext context;
    const CallResult result = ToCallResult(call(&context));
    EXPECT_TRUE(result.ok()) << result.message;
  }

  const std::string target_;
  const std::unique_ptr<v1::AdminService::Stub> stub_;
};

v1::GenerateRequest Named(const std::string& id, uint32_t max_output_tokens) {
  v1::GenerateRequest request = TextRequest("prompt", max_output_tokens);
  request.set_request_id(id);
  return request;
}

TEST(AdminTest, DrainRefusesUntilItIsTakenBack) {  // L12
  TestServer server(WithAdmin());
  Operator admin(server);
  InferenceClient client(server.target());
  server.runner().CloseGate();
  std::future<Answer> running = server.GenerateAsync(Named("running", 40));
  server.runner().WaitUntilAtGate();

  EXPECT_EQ(admin.SetDrain(true), v1::SERVING_STATE_DRAINING);
  EXPECT_EQ(client.Health(""), HealthState::kNotServing);
  const Answer refused = server.Generate(TextRequest("x", 2));
  EXPECT_EQ(refused.result.code, kUnavailable);
  EXPECT_EQ(refused.result.reason, "DRAINING");
  server.runner().OpenGate();
  const Answer ended = running.get();
  EXPECT_TRUE(ended.result.ok()) << ended.result.message;
  EXPECT_EQ(ended.ids.size(), 40u);

  EXPECT_EQ(admin.SetDrain(false), v1::SERVING_STATE_SERVING);
  EXPECT_EQ(client.Health(""), HealthState::kServing);
  EXPECT_TRUE(server.Generate(TextRequest("x", 2)).result.ok());
  EXPECT_EQ(server.LeakCheck(), "");
}

TEST(AdminTest, AServerThatEndsOrFailedIsNotTakenBack) {
  TestServer ending(WithAdmin());
  Operator admin(ending);
  ending.server().SetDraining();
  EXPECT_EQ(admin.SetDrain(false), v1::SERVING_STATE_DRAINING);
  EXPECT_EQ(InferenceClient(ending.target()).Health(""), HealthState::kNotServing);

  TestServer failed(WithAdmin());
  failed.server().SetFailed();
  EXPECT_EQ(Operator(failed).SetDrain(false), v1::SERVING_STATE_FAILED);
}

TEST(AdminTest, ALoadingServerStaysDrainedOnceItServes) {
  TestServerOptions options = WithAdmin();
  options.serve = false;
  TestServer server(options);
  Operator admin(server);
  EXPECT_EQ(admin.Stats().state(), v1::SERVING_STATE_LOADING);
  EXPECT_EQ(admin.SetDrain(true), v1::SERVING_STATE_LOADING);
  server.Serve();
  EXPECT_EQ(admin.Stats().state(), v1::SERVING_STATE_DRAINING);
  EXPECT_EQ(admin.SetDrain(false), v1::SERVING_STATE_SERVING);
}

TEST(AdminTest, OpenRequestsAreListedWithoutTheirTextAndCancelledByTheirId) {
  TestServer server(WithAdmin());
  Operator admin(server);
  EXPECT_TRUE(admin.List().empty());
  server.runner().CloseGate();
  std::future<Answer> first = server.GenerateAsync(Named("first", 500));
  ASSERT_TRUE(Eventually([&] { return admin.List().size() == 1; }));
  std::future<Answer> second = server.GenerateAsync(Named("second", 30));
  ASSERT_TRUE(Eventually([&] { return admin.List().size() == 2; }));
  const std::vector<v1::OpenRequest> rows = admin.List();
  EXPECT_EQ(rows[0].request_id(), "first");
  EXPECT_EQ(rows[0].prompt_tokens(), 6u);
  EXPECT_EQ(rows[0].max_output_tokens(), 500u);
  const auto age = [](const v1::OpenRequest& row) {
    return std::pair(row.age().seconds(), row.age().nanos());
  };
  EXPECT_GE(age(rows[0]), age(rows[1]));
  EXPECT_THAT(rows[0].ShortDebugString(), testing::Not(HasSubstr("prompt\"")));

  EXPECT_TRUE(admin.Cancel("first").ok());
  server.runner().OpenGate();
  EXPECT_EQ(first.get().result.code, kCancelled);
  EXPECT_TRUE(second.get().result.ok());
  const CallResult unknown = admin.Cancel("first");
  EXPECT_EQ(unknown.code, kNotFound);
  EXPECT_EQ(unknown.reason, "REQUEST_NOT_FOUND");
  EXPECT_EQ(server.LeakCheck(), "");
  EXPECT_TRUE(Eventually([&] { return admin.List().empty(); }));
}

TEST(AdminTest, StatsAreTheEngines) {
  TestServer server(WithAdmin());
  Operator admin(server);
  EXPECT_TRUE(server.Generate(TextRequest("x", 5)).result.ok());
  ASSERT_EQ(server.LeakCheck(), "");
  const v1::GetEngineStatsResponse stats = admin.Stats();
  EXPECT_EQ(stats.state(), v1::SERVING_STATE_SERVING);
  EXPECT_EQ(stats.steps(), static_cast<uint64_t>(server.engine().stats().steps));
  EXPECT_EQ(stats.kv_blocks_total(), 1024u);
  EXPECT_EQ(stats.kv_blocks_used() + stats.requests_running() + stats.requests_waiting(), 0u);
  EXPECT_EQ(stats.kv_blocks_unaccounted(), 0);
}

TEST(AdminTest, AfterAResetNoPrefixIsFound) {
  TestServer server(WithAdmin());
  Operator admin(server);
  const std::string prompt(64, 'p');
  const auto cached = [&] {
    return server.Generate(TextRequest(prompt, 2)).finished.usage().cached_prompt_tokens();
  };
  EXPECT_EQ(cached(), 0u);
  EXPECT_GT(cached(), 0u);
  admin.ResetPrefixCache();
  EXPECT_EQ(cached(), 0u);
  EXPECT_EQ(server.LeakCheck(), "");
}

TEST(AdminTest, NothingAnswersWithoutCredentials) {  // N20
  const auto security = *ServerSecurity::Load(
      {{}, WriteTestFile("admin_tokens", *TokenLine("alice", "fq_operator", ""))});
  TestServerOptions options = WithAdmin();
  options.server.security = security.get();
  TestServer server(options);
  Operator admin(server);
  InferenceClient raw(admin.target());
  const auto* service = v1::GetEngineStatsRequest::descriptor()->file()->service(0);
  ASSERT_EQ(service->method_count(), 5);
  for (int i = 0; i < service->method_count(); ++i) {
    const std::string path = "/" + service->full_name() + "/" + service->method(i)->name();
    std::string bytes;
    EXPECT_EQ(raw.CallRaw(path, "", &bytes).code, kUnauthenticated) << path;
    CallOptions good;
    good.metadata.emplace_back("authorization", "Bearer fq_operator");
    EXPECT_NE(raw.CallRaw(path, "", &bytes, good).code, kUnauthenticated) << path;
  }
  EXPECT_EQ(raw.CallRaw("/flashquant.v1.AdminService/Unknown", "", nullptr).code, kUnauthenticated);
}

TEST(AdminTest, ThePortOfTheClientsHasNoAdminService) {
  TestServer server(WithAdmin());
  InferenceClient client(server.target());
  EXPECT_EQ(client.CallRaw("/flashquant.v1.AdminService/SetDrain", "\x08\x01", nullptr).code,
            kUnimplemented);
  EXPECT_TRUE(server.Generate(TextRequest("x", 2)).result.ok());
}

}  // namespace
}  // namespace flashquant
