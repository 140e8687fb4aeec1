// What arrives on the wire from clients that are broken, newer or hostile, and the standard
// services beside ours: health and reflection. Ids in comments are rows of the reliability matrix.
#include <chrono>
#include <random>

#include "gmock/gmock.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "gtest/gtest.h"
#include "server/shutdown.h"
#include "tests/e2e/test_server.h"

namespace flashquant {
namespace {

using ::testing::AnyOf;
using namespace std::chrono_literals;

constexpr int kNotFound = 5, kInvalidArgument = 3, kResourceExhausted = 8, kUnimplemented = 12,
              kUnavailable = 14;
constexpr char kGenerate[] = "/flashquant.v1.InferenceService/Generate";
constexpr char kService[] = "flashquant.v1.InferenceService";
constexpr char kReflection[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

TEST(ProtocolTest, InvalidUtf8IsRefused) {  // R5
  TestServer server;
  InferenceClient client(server.target());
  const CallResult result = client.CallRaw(kGenerate, std::string("\x1a\x02\xc3(", 4), nullptr);
  EXPECT_EQ(result.code, kInvalidArgument);
  EXPECT_EQ(result.reason, "MALFORMED_REQUEST");
  EXPECT_EQ(result.message,
            "request: cannot be parsed, has over 10000 fields, or a text in it is not valid UTF-8");
  EXPECT_EQ(server.LeakCheck(), "");
}

TEST(ProtocolTest, TooLargeMessageIsRefusedByTheLibrary) {  // R9
  TestServer server;
  InferenceClient client(server.target());
  const CallResult result = client.CallRaw(kGenerate, std::string(5 << 20, 'x'), nullptr);
  EXPECT_EQ(result.code, kResourceExhausted);
  EXPECT_EQ(result.reason, "");
  EXPECT_TRUE(server.Generate(TextRequest("next", 2)).result.ok());
  EXPECT_EQ(server.LeakCheck(), "");
}

TEST(ProtocolTest, UnknownFieldsAreIgnored) {  // R36
  TestServer server;
  v1::GenerateRequest request = TextRequest("newer", 3);
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(100)->assign("new");
  const Answer answer = server.Generate(request);
  EXPECT_TRUE(answer.result.ok()) << answer.result.message;
  EXPECT_EQ(answer.ids.size(), 3u);
}

TEST(ProtocolTest, ReservedFieldsAreNotIgnored) {  // R37
  TestServer server;
  v1::GenerateRequest request = TextRequest("newer", 3);
  request.GetReflection()->MutableUnknownFields(&request)->AddVarint(12, 4);
  const Answer answer = server.Generate(request);
  EXPECT_EQ(answer.result.code, kUnimplemented);
  EXPECT_EQ(answer.result.reason, "FEATURE_DISABLED");
  EXPECT_EQ(answer.result.message, "field 12: not available in this version");
}

TEST(ProtocolTest, RandomBytesAreRefusedAndTheConnectionStaysUsable) {  // R38
  TestServer server;
  InferenceClient client(server.target());
  std::mt19937 random(20240607);
  for (int i = 0; i < 200; ++i) {
    std::string bytes(1 + random() % 64, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    const CallResult result = client.CallRaw(kGenerate, bytes, nullptr);
    EXPECT_THAT(result.code, AnyOf(kInvalidArgument, kNotFound)) << "message " << i;
  }
  v1::GetModelResponse model;
  EXPECT_TRUE(client.GetModel({}, &model).ok());
  EXPECT_EQ(server.LeakCheck(), "");
}

TEST(ProtocolTest, DeeplyNestedGroupsAreRefused) {  // R39
  TestServer server;
  InferenceClient client(server.target());
  // 100 000 times "start group" of field 100.
  std::string bytes;
  for (int i = 0; i < 100000; ++i) bytes += "\xa3\x06";
  const CallResult result = client.CallRaw(kGenerate, bytes, nullptr);
  EXPECT_EQ(result.code, kInvalidArgument);
  EXPECT_EQ(result.reason, "MALFORMED_REQUEST");
  EXPECT_TRUE(server.Generate(TextRequest("next", 2)).result.ok());
}

// Two million empty messages, biases, stops or groups in 4 MB would be a hundred megabytes a call.
TEST(ProtocolTest, AMessageThatWouldTakeFarMoreThanItsBytesIsRefused) {
  TestServer server;
  InferenceClient client(server.target());
  for (const std::string& two_bytes :
       {std::string("\x7b\x7c"), std::string("\x7a\x00", 2), std::string("\x2a\x00", 2)}) {
    std::string bytes;
    for (int i = 0; i < 2'000'000; ++i) bytes += two_bytes;
    const CallResult result = client.CallRaw(kGenerate, bytes, nullptr);
    EXPECT_EQ(result.code, kInvalidArgument);
    EXPECT_EQ(result.reason, "MALFORMED_REQUEST");
  }
  EXPECT_TRUE(server.Generate(TextRequest("next", 2)).result.ok());
  EXPECT_EQ(server.LeakCheck(), "");
}

// A million ids may stand for a hundred megabytes of text.
TEST(ProtocolTest, ATextThatIsTooLongForAMessageIsRefused) {
  TestServer server;
  InferenceClient client(server.target());
  uint32_t longest = 256;  // below are bytes
  const auto bytes_of = [&](uint32_t id) {
    return server.tokenizer().TokenBytes(static_cast<int32_t>(id)).size();
  };
  for (uint32_t id = longest; id < 900; ++id) {
    if (bytes_of(id) > bytes_of(longest)) longest = id;
  }
  const size_t most = (size_t{3} << 20) / bytes_of(longest);
  v1::DetokenizeRequest request;
  for (size_t i = 0; i < most; ++i) request.add_token_ids(longest);
  v1::DetokenizeResponse text;
  ASSERT_TRUE(client.Detokenize(request, &text).ok());
  EXPECT_EQ(text.text().size(), most * bytes_of(longest));
  request.add_token_ids(longest);
  const CallResult refused = client.Detokenize(request, &text);
  EXPECT_EQ(refused.code, kInvalidArgument);
  EXPECT_EQ(refused.reason, "PARAMETER_OUT_OF_RANGE");
  EXPECT_EQ(refused.message, "token_ids: text too long (limit 3145728 bytes), send fewer");
}

TEST(ProtocolTest, UnknownMethodsAreCountedUnderOneLabel) {  // R40, O3
  TestServer server;
  InferenceClient client(server.target());
  for (const char* method : {"/flashquant.v1.InferenceService/Nothing", "/no.such.Service/Method",
                             "/flashquant.v1.AdminService/SetDrain"}) {
    EXPECT_EQ(client.CallRaw(method, "", nullptr).code, kUnimplemented) << method;
  }
  EXPECT_EQ(server.LeakCheck(), "");
  EXPECT_EQ(server.Scrape().Sum("flashquant_requests_finished_total",
                                {{"method", "other"}, {"code", "UNIMPLEMENTED"}}),
            3);
}

TEST(ProtocolTest, CallsWhileLoadingAreUnavailable) {  // L1
  TestServerOptions options;
  options.serve = false;
  TestServer server(options);
  InferenceClient client(server.target());
  const Answer answer = server.Generate(TextRequest("early", 2));
  EXPECT_EQ(answer.result.code, kUnavailable);
  EXPECT_EQ(answer.result.reason, "MODEL_LOADING");
  EXPECT_EQ(answer.result.message, "model is loading");
  EXPECT_TRUE(answer.result.retry_seconds.has_value());
  v1::TokenizeResponse ids;
  EXPECT_EQ(client.Tokenize({}, &ids).reason, "MODEL_LOADING");
  EXPECT_EQ(client.Health(kService), HealthState::kNotServing);
  server.Serve();
  EXPECT_TRUE(server.Generate(TextRequest("early", 2)).result.ok());
}

TEST(ProtocolTest, HealthFollowsLoadingServingDraining) {  // N22
  TestServerOptions options;
  options.serve = false;
  TestServer server(options);
  InferenceClient client(server.target());
  const std::vector<std::string> names = {"", kService, "model/fake"};
  for (const std::string& name : names) {
    EXPECT_EQ(client.Health(name), HealthState::kNotServing) << name;
  }
  server.Serve();
  for (const std::string& name : names) {
    EXPECT_EQ(client.Health(name), HealthState::kServing) << name;
  }
  CallResult unknown;
  EXPECT_EQ(client.Health("model/other", &unknown), HealthState::kNoSuchService);
  EXPECT_EQ(unknown.code, kNotFound);
  server.server().SetDraining();
  for (const std::string& name : names) {
    EXPECT_EQ(client.Health(name), HealthState::kNotServing) << name;
  }
}

TEST(ProtocolTest, ReflectionIsThereOnlyWhenAskedFor) {  // N23
  TestServer off;
  InferenceClient off_client(off.target());
  // ServerReflectionRequest { list_services = 7 }
  const std::string list("\x3a\x00", 2);
  EXPECT_EQ(off_client.CallRaw(kReflection, list, nullptr).code, kUnimplemented);
  TestServerOptions options;
  options.server.reflection = true;
  TestServer on(options);
  InferenceClient on_client(on.target());
  std::string services;
  ASSERT_TRUE(on_client.CallRaw(kReflection, list, &services).ok());
  EXPECT_THAT(services, ::testing::HasSubstr(kService));
}

// An answer repeats its question, and stays with a client that does not read it.
TEST(ProtocolTest, ALongQuestionOfReflectionIsRefused) {
  TestServerOptions options;
  options.server.reflection = true;
  TestServer server(options);
  InferenceClient client(server.target());
  grpc::reflection::v1alpha::ServerReflectionRequest request;
  request.set_file_by_filename(std::string(4000, 'x'));
  EXPECT_TRUE(client.CallRaw(kReflection, request.SerializeAsString(), nullptr).ok());
  request.set_file_by_filename(std::string(5000, 'x'));
  EXPECT_EQ(client.CallRaw(kReflection, request.SerializeAsString(), nullptr).code,
            kInvalidArgument);
  EXPECT_EQ(client.CallRaw(kReflection, "\xff", nullptr).code, kInvalidArgument);
}

TEST(ProtocolTest, DrainLetsRunningAnswersEnd) {  // L2
  TestServer server;
  server.runner().CloseGate();
  std::future<Answer> running = server.GenerateAsync(TextRequest("running", 30));
  server.runner().WaitUntilAtGate();
  InferenceClient client(server.target());
  ASSERT_EQ(client.Health(""), HealthState::kServing);
  server.server().SetDraining();
  EXPECT_EQ(client.Health(""), HealthState::kNotServing);
  const Answer refused = server.Generate(TextRequest("late", 2));
  EXPECT_EQ(refused.result.code, kUnavailable);
  EXPECT_EQ(refused.result.reason, "DRAINING");
  server.runner().OpenGate();
  const bool ended = DrainServer(&server.server(), &server.engine(),
                                 std::chrono::steady_clock::now() + 20s, [] { return false; });
  EXPECT_TRUE(ended);
  const Answer answer = running.get();
  EXPECT_TRUE(answer.result.ok()) << answer.result.message;
  EXPECT_EQ(answer.ids.size(), 30u);
}

TEST(ProtocolTest, DrainThatIsOverEndsAnswersAsUnavailable) {  // L3, O5
  TestServerOptions options;
  options.engine.context_length = 16000;
  TestServer server(options);
  std::atomic<bool> got_token{false};
  InferenceClient client(server.target());
  std::future<CallResult> running = std::async(std::launch::async, [&] {
    return client.Generate(TextRequest("long", 15000), [&](const v1::GenerateResponse& response) {
      if (response.has_delta()) got_token.store(true);
      return true;
    });
  });
  ASSERT_TRUE(Eventually([&] { return got_token.load(); }));
  const bool ended = DrainServer(&server.server(), &server.engine(),
                                 std::chrono::steady_clock::now() + 20ms, [] { return false; });
  EXPECT_FALSE(ended);
  const CallResult result = running.get();
  EXPECT_EQ(result.code, kUnavailable);
  EXPECT_EQ(result.reason, "DRAINING");
  EXPECT_EQ(result.message, "server is shutting down");
  EXPECT_EQ(server.LeakCheck(), "");
}

TEST(ProtocolTest, HurriedDrainEndsAtOnce) {  // L4
  TestServerOptions options;
  options.engine.context_length = 16000;
  TestServer server(options);
  std::future<Answer> running = server.GenerateAsync(TextRequest("long", 15000));
  ASSERT_TRUE(Eventually([&] { return server.engine().stats().requests_running == 1; }));
  const TimePoint start = std::chrono::steady_clock::now();
  DrainServer(&server.server(), &server.engine(), start + 60s, [] { return true; });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  EXPECT_EQ(running.get().result.reason, "DRAINING");
}

TEST(ProtocolTest, StartAndStopManyTimes) {  // L13
  for (int i = 0; i < 20; ++i) {
    TestServer server;
    ASSERT_TRUE(server.Generate(TextRequest("x", 2)).result.ok());
  }
}

TEST(ProtocolTest, PortInUseIsAnError) {  // C3
  TestServer server;
  InferenceServerOptions options;
  options.address = server.target();
  const SteadyClock clock;
  const auto second = InferenceServer::Start(options, nullptr, &clock);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.status().message()),
              ::testing::StartsWith("cannot bind " + server.target()));
}

}  // namespace
}  // namespace flashquant
