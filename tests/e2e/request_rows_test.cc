// Rows of the reliability matrix that need a whole server: prompts that fill the KV pool exactly,
// and hostile or odd texts through a real tokenizer.
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/test_server.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

TEST(KvPoolRowTest, ARequestOfExactlyThePoolRunsAndOthersWaitForIt) {  // R14
  TestServerOptions options;
  options.engine.num_blocks = 1 + 8;  // 128 positions
  TestServer server(options);
  server.runner().CloseGate();
  // The last token is drawn, never computed: 100 + 29 - 1 positions.
  std::future<Answer> whole = server.GenerateAsync(TextRequest(std::string(100, 'w'), 29));
  server.runner().WaitUntilAtGate();
  std::future<Answer> other = server.GenerateAsync(TextRequest("other", 5));
  EXPECT_TRUE(
      Eventually([&] { return server.Scrape().Sum("flashquant_requests_received_total") == 2; }));
  server.runner().OpenGate();
  const Answer first = whole.get();
  const Answer second = other.get();
  EXPECT_EQ(first.ids.size(), 29u);
  EXPECT_EQ(second.ids.size(), 5u);
  // It was there before the first one's first token, and began after its last.
  const auto seconds = [](const google::protobuf::Duration& duration) {
    return static_cast<double>(duration.seconds()) + duration.nanos() * 1e-9;
  };
  EXPECT_GE(seconds(second.finished.timing().queue()), seconds(first.finished.timing().decode()));
  const Answer more = server.Generate(TextRequest(std::string(100, 'w'), 30));
  EXPECT_EQ(more.result.reason, "KV_CAPACITY_EXCEEDED");
  EXPECT_EQ(server.LeakCheck(), "");
}

class RealTokenizerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    FQ_SKIP_WITHOUT_SHARED_DATA("models/story-22m");
    serve_ = std::make_unique<ServeProcess>(
        std::vector<std::string>{"--model", SharedDataPath("models/story-22m")});
    ASSERT_TRUE(serve_->WaitUntilServing()) << serve_->err();
    client_ = std::make_unique<InferenceClient>(serve_->target());
  }
  // Ids of the text as a prompt has them, without BOS.
  std::vector<uint32_t> Tokenize(const std::string& text) {
    v1::TokenizeRequest request;
    request.set_text(text);
    v1::TokenizeResponse response;
    const CallResult result = client_->Tokenize(request, &response);
    EXPECT_TRUE(result.ok()) << result.message;
    return {response.token_ids().begin(), response.token_ids().end()};
  }
  std::string Detokenize(const std::vector<uint32_t>& ids) {
    v1::DetokenizeRequest request;
    request.mutable_token_ids()->Add(ids.begin(), ids.end());
    v1::DetokenizeResponse response;
    const CallResult result = client_->Detokenize(request, &response);
    EXPECT_TRUE(result.ok()) << result.message;
    return response.text();
  }
  // What the server's process has used of the processors, whatever else this machine does.
  double ServerCpuSeconds() const {
    std::ifstream file("/proc/" + std::to_string(serve_->pid()) + "/stat");
    std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::istringstream fields(text.substr(text.rfind(')') + 1));
    std::string skipped;
    for (int field = 3; field < 14; ++field) fields >> skipped;
    int64_t user = 0, system = 0;
    fields >> user >> system;
    EXPECT_GT(user, 0);
    return static_cast<double>(user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
  }
  // One greedy token after the text.
  Answer Generate(const std::string& text) {
    Answer answer;
    v1::GenerateRequest request = TextRequest(text, 1);
    request.mutable_sampling()->set_temperature(0);
    answer.result = client_->Generate(request, [&](const v1::GenerateResponse& response) {
      answer.Add(response);
      return true;
    });
    return answer;
  }

  std::unique_ptr<ServeProcess> serve_;
  std::unique_ptr<InferenceClient> client_;
};

std::string Repeat(const std::string& part, size_t num_bytes) {
  std::string text;
  while (text.size() + part.size() <= num_bytes) text += part;
  return text;
}

TEST_F(RealTokenizerTest, OddButValidTextIsServed) {  // R6
  for (const std::string& text :
       {std::string("a\0b", 3), std::string("\x01\x02\x1f\x7f"), std::string("\xEF\xBB\xBFtext"),
        std::string("\xE2\x80\xAEright to left"), std::string("\xF4\x8F\xBF\xBF")}) {
    const Answer answer = Generate(text);
    EXPECT_TRUE(answer.result.ok()) << answer.result.message;
    EXPECT_EQ(answer.accepted.prompt_tokens(), 1 + Tokenize(text).size());
    EXPECT_EQ(Detokenize(Tokenize(text)), text);
  }
}

TEST_F(RealTokenizerTest, TextThatSpellsAControlTokenIsPlain) {  // R7
  v1::GetModelResponse model;
  ASSERT_TRUE(client_->GetModel({}, &model).ok());
  ASSERT_GT(model.eos_token_ids_size(), 0);
  for (const uint32_t control : {model.eos_token_ids(0), model.prompt_bos_token_id()}) {
    const std::string spelled = Detokenize({control});
    ASSERT_FALSE(spelled.empty());
    const std::vector<uint32_t> ids = Tokenize("before " + spelled + " after");
    EXPECT_THAT(ids, ::testing::Not(::testing::Contains(control)));
    EXPECT_TRUE(Generate(spelled).result.ok());
  }
}

TEST_F(RealTokenizerTest, AMebibyteOfAnythingIsTokenizedInLinearTime) {  // R41, R42
  for (const std::string& part : {std::string("a"), std::string(" "),
                                  std::string("\xF0\x9F\x98\x80"), std::string("aA .9")}) {
    const std::string text = Repeat(part, 1 << 20);
    const double before = ServerCpuSeconds();
    EXPECT_FALSE(Tokenize(text).empty());
    EXPECT_EQ(Generate(text).result.reason, "CONTEXT_LENGTH_EXCEEDED") << part;
    // Twice a few tenths of a second; anything that is not linear takes minutes.
    EXPECT_LT(ServerCpuSeconds() - before, 6.0) << part;
  }
  EXPECT_TRUE(Generate("still here").result.ok());
}

}  // namespace
}  // namespace flashquant
