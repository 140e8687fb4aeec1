// What a request may ask for, over a real connection: penalties, biases, logprobs, gathered deltas.
// The golden tests compare a served model with transformers' logits and formulas written here.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/server_process.h"
#include "tests/e2e/test_server.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

class RequestSurfaceTest : public ::testing::Test {
 protected:
  void TearDown() override {
    server_.runner().OpenGate();
    EXPECT_EQ(server_.LeakCheck(), "");
  }
  std::vector<v1::Delta> Deltas(const v1::GenerateRequest& request) {
    std::vector<v1::Delta> deltas;
    InferenceClient client(server_.target());
    const CallResult result = client.Generate(request, [&](const v1::GenerateResponse& response) {
      if (response.has_delta()) deltas.push_back(response.delta());
      return true;
    });
    EXPECT_TRUE(result.ok()) << result.message;
    return deltas;
  }

  TestServer server_;
};

// The pretended model gives each token's logprob as -id / 4.
void ExpectFakeLogprob(const v1::TokenLogprob& logprob, int32_t id, const Tokenizer& tokenizer) {
  EXPECT_EQ(logprob.token_id(), static_cast<uint32_t>(id));
  EXPECT_EQ(logprob.logprob(), -0.25f * static_cast<float>(id));
  EXPECT_EQ(logprob.token(), tokenizer.TokenBytes(id));
}

TEST_F(RequestSurfaceTest, EveryTokenOfTheAnswerHasItsLogprobs) {
  for (const bool ids_too : {true, false}) {
    v1::GenerateRequest request = TextRequest("hello", 40, 3);
    request.mutable_output()->set_top_logprobs(2);
    request.mutable_output()->set_token_ids(ids_too);
    request.mutable_output()->set_omit_text(!ids_too);
    std::vector<int32_t> tokens;
    for (const v1::Delta& delta : Deltas(request)) {
      EXPECT_EQ(delta.first_index(), tokens.size());
      EXPECT_EQ(delta.token_ids_size(), ids_too ? delta.logprobs_size() : 0);
      for (const v1::Logprob& logprob : delta.logprobs()) {
        tokens.push_back(static_cast<int32_t>(logprob.chosen().token_id()));
        ExpectFakeLogprob(logprob.chosen(), tokens.back(), server_.tokenizer());
        ASSERT_EQ(logprob.top_size(), 2);
        ExpectFakeLogprob(logprob.top(0), 0, server_.tokenizer());
        ExpectFakeLogprob(logprob.top(1), 1, server_.tokenizer());
      }
    }
    EXPECT_THAT(tokens, ElementsAreArray(server_.model().Answer(
                            server_.tokenizer().Encode("hello", SpecialText::kPlain), 3, 40)));
  }
}

TEST_F(RequestSurfaceTest, NoLogprobsUnlessAskedFor) {
  for (const v1::Delta& delta : Deltas(TextRequest("hello", 5, 3))) {
    EXPECT_EQ(delta.logprobs_size(), 0);
  }
}

TEST_F(RequestSurfaceTest, GenerateTextGathersLogprobs) {
  v1::GenerateTextRequest request;
  *request.mutable_request() = TextRequest("all", 30, 3);
  request.mutable_request()->mutable_output()->set_top_logprobs(0);
  request.mutable_request()->mutable_output()->set_tokens_per_message(8);
  v1::GenerateTextResponse response;
  const CallResult result = InferenceClient(server_.target()).GenerateText(request, &response);
  ASSERT_TRUE(result.ok()) << result.message;
  ASSERT_EQ(response.logprobs_size(), 30);
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(response.logprobs(i).chosen().token_id(), response.token_ids(i));
    EXPECT_EQ(response.logprobs(i).top_size(), 0);
  }
}

TEST(LargeAnswerTest, GenerateTextRefusesAnAnswerThatItsLogprobsMakeTooLarge) {
  TestServerOptions options;
  options.text_repeat = 2000;  // ten kilobytes per token
  TestServer server(options);
  v1::GenerateTextRequest request;
  *request.mutable_request() = TextRequest("all", 200, 3);
  request.mutable_request()->mutable_output()->set_omit_text(true);
  v1::GenerateTextResponse response;
  EXPECT_TRUE(InferenceClient(server.target()).GenerateText(request, &response).ok());
  request.mutable_request()->mutable_output()->set_top_logprobs(0);
  const CallResult result = InferenceClient(server.target()).GenerateText(request, &response);
  EXPECT_EQ(result.code, 8);
  EXPECT_EQ(result.reason, "ANSWER_TOO_LARGE");
  EXPECT_EQ(server.LeakCheck(), "");
}

TEST_F(RequestSurfaceTest, MessagesHaveTheTokensThatTheClientAskedFor) {
  v1::GenerateRequest request = TextRequest("count", 100, 5);
  request.mutable_output()->set_tokens_per_message(16);
  const TimePoint start = std::chrono::steady_clock::now();
  const std::vector<v1::Delta> deltas = Deltas(request);
  const Duration elapsed = std::chrono::steady_clock::now() - start;
  int tokens = 0;
  int64_t small = 0;
  for (const v1::Delta& delta : deltas) {
    EXPECT_EQ(delta.first_index(), static_cast<uint32_t>(tokens));
    tokens += delta.token_ids_size();
    small += delta.token_ids_size() < 16 ? 1 : 0;
  }
  EXPECT_EQ(tokens, 100);
  // The last one, and one for each time that a token had waited long enough.
  EXPECT_LE(small, 1 + elapsed / GenerateSession::kGatherTime);
}

TEST_F(RequestSurfaceTest, UsageAndTimingsAreExactWhateverTheMessagesHold) {
  for (const uint32_t per_message : {0u, 1u, 7u, 256u}) {
    v1::GenerateRequest request = TextRequest("count", 33, 5);
    request.mutable_output()->set_tokens_per_message(per_message);
    const Answer answer = server_.Generate(request);
    ASSERT_TRUE(answer.result.ok());
    EXPECT_TRUE(answer.in_order);
    EXPECT_EQ(answer.ids.size(), 33u);
    EXPECT_EQ(answer.finished.usage().output_tokens(), 33u);
    EXPECT_EQ(answer.finished.usage().prompt_tokens(), 5u);
    const auto seconds = [](const google::protobuf::Duration& duration) {
      return static_cast<double>(duration.seconds()) + duration.nanos() * 1e-9;
    };
    const v1::Timing& timing = answer.finished.timing();
    EXPECT_NEAR(seconds(timing.first_token()), seconds(timing.queue()) + seconds(timing.prefill()),
                1e-6);
    EXPECT_GT(seconds(timing.decode()), 0.0);
  }
}

TEST_F(RequestSurfaceTest, TokensThatWaitForOthersAreSentInTime) {
  // The model stops after three tokens until the client has seen them.
  int launches = 0;
  server_.runner().OnLaunch([&](const StepPlan&) {
    if (++launches == 4) server_.runner().CloseGate();
  });
  v1::GenerateRequest request = TextRequest("count", 8, 5);
  request.mutable_output()->set_tokens_per_message(200);
  std::vector<int> sizes;
  InferenceClient client(server_.target());
  const CallResult result = client.Generate(request, [&](const v1::GenerateResponse& response) {
    if (!response.has_delta()) return true;
    sizes.push_back(response.delta().token_ids_size());
    server_.runner().OpenGate();
    return true;
  });
  EXPECT_TRUE(result.ok());
  ASSERT_FALSE(sizes.empty());
  EXPECT_LE(sizes[0], 3);
  EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), 0), 8);
}

TEST_F(RequestSurfaceTest, PenaltiesBiasesPriorityAndSaltAreTakenAndReported) {
  v1::GenerateRequest request = TextRequest("hello", 30, 3);
  request.set_priority(-3);
  request.set_cache_salt("tenant");
  v1::SamplingParams* sampling = request.mutable_sampling();
  sampling->set_repetition_penalty(1.5f);
  sampling->set_presence_penalty(0.5f);
  sampling->set_frequency_penalty(-0.25f);
  v1::LogitBias* bias = sampling->add_logit_bias();
  bias->set_token_id(7);
  bias->set_bias(-100.0f);
  const Answer answer = server_.Generate(request);  // the runner checks the counts in each plan
  ASSERT_TRUE(answer.result.ok()) << answer.result.message;
  EXPECT_EQ(answer.ids.size(), 30u);
  EXPECT_EQ(answer.accepted.sampling().repetition_penalty(), 1.5f);
  EXPECT_EQ(answer.accepted.sampling().presence_penalty(), 0.5f);
  EXPECT_EQ(answer.accepted.sampling().frequency_penalty(), -0.25f);
}

// A served OPT model (no rotary embedding, which transformers rounds its own way) against the
// logits that transformers gave for the same tokens.
class GoldenSurfaceTest : public ::testing::Test {
 protected:
  struct Sequence {
    std::vector<int32_t> prompt;
    std::vector<double> logits;  // after the prompt
  };
  void SetUp() override {
    ASSERT_TRUE(serve_.WaitUntilServing()) << serve_.err();
    std::ifstream file(TestDataPath("tiny_models/opt/expected.json"));
    const nlohmann::json expected = nlohmann::json::parse(file);
    for (const nlohmann::json& sequence : expected["sequences"]) {
      sequences_.push_back({sequence["input_ids"].get<std::vector<int32_t>>(),
                            sequence["last_logits"].get<std::vector<double>>()});
    }
    ASSERT_EQ(sequences_.size(), 3u);
  }
  // One greedy token after the prompt.
  v1::Logprob FirstToken(const Sequence& sequence, const v1::SamplingParams& sampling,
                         uint32_t top_logprobs) {
    v1::GenerateRequest request;
    *request.mutable_sampling() = sampling;
    request.mutable_sampling()->set_temperature(0);
    request.mutable_token_ids()->mutable_ids()->Add(sequence.prompt.begin(), sequence.prompt.end());
    request.mutable_stop()->set_max_output_tokens(1);
    request.mutable_stop()->set_ignore_eos(true);
    request.mutable_output()->set_top_logprobs(top_logprobs);
    v1::Logprob first;
    const CallResult result = InferenceClient(serve_.target())
                                  .Generate(request, [&](const v1::GenerateResponse& response) {
                                    if (response.has_delta()) first = response.delta().logprobs(0);
                                    return true;
                                  });
    EXPECT_TRUE(result.ok()) << result.message;
    return first;
  }
  static std::vector<double> LogSoftmax(const std::vector<double>& logits) {
    double total = 0.0;
    for (const double logit : logits) total += std::exp(logit);
    std::vector<double> result;
    for (const double logit : logits) result.push_back(logit - std::log(total));
    return result;
  }

  // Between two implementations of the model, and logits printed with five decimals.
  static constexpr double kTolerance = 2e-3;
  ServeProcess serve_{{"--model", TestDataPath("tiny_models/opt")}};
  std::vector<Sequence> sequences_;
};

TEST_F(GoldenSurfaceTest, LogprobsAreThoseOfTransformers) {
  for (const Sequence& sequence : sequences_) {
    const std::vector<double> expected = LogSoftmax(sequence.logits);
    const v1::Logprob first = FirstToken(sequence, {}, 20);
    EXPECT_NEAR(first.chosen().logprob(), expected[first.chosen().token_id()], kTolerance);
    ASSERT_EQ(first.top_size(), 20);
    std::vector<double> sorted = expected;
    std::ranges::sort(sorted, std::greater<>());
    for (int i = 0; i < 20; ++i) {
      EXPECT_NEAR(first.top(i).logprob(), expected[first.top(i).token_id()], kTolerance);
      EXPECT_NEAR(first.top(i).logprob(), sorted[static_cast<size_t>(i)], kTolerance) << i;
    }
    EXPECT_EQ(first.chosen().token_id(), first.top(0).token_id());
  }
}

TEST_F(GoldenSurfaceTest, PenaltiesAndBiasesMoveTheChoiceAsTheirFormulasSay) {
  for (const Sequence& sequence : sequences_) {
    for (const float penalty : {0.3f, 1.8f}) {
      for (const float bias : {0.0f, 9.0f}) {
        v1::SamplingParams sampling;
        sampling.set_repetition_penalty(penalty);
        sampling.set_frequency_penalty(2.0f);  // there is no answer yet that it could count
        v1::LogitBias* added = sampling.add_logit_bias();
        added->set_token_id(100);
        added->set_bias(bias);
        std::vector<double> expected = sequence.logits;
        for (size_t id = 0; id < expected.size(); ++id) {
          if (std::ranges::count(sequence.prompt, static_cast<int32_t>(id)) > 0) {
            expected[id] = expected[id] > 0 ? expected[id] / penalty : expected[id] * penalty;
          }
        }
        expected[100] += bias;
        const v1::Logprob first = FirstToken(sequence, sampling, 0);
        EXPECT_NEAR(expected[first.chosen().token_id()], *std::ranges::max_element(expected),
                    kTolerance);
        // What is reported is the model's own.
        EXPECT_NEAR(first.chosen().logprob(),
                    LogSoftmax(sequence.logits)[first.chosen().token_id()], kTolerance);
      }
    }
  }
}

TEST_F(GoldenSurfaceTest, TheGenerateCommandSendsWhatItsFlagsSay) {
  Process generate({"generate",
                    "--target",
                    serve_.target(),
                    "--prompt-ids",
                    "1,2,3",
                    "--max-tokens",
                    "3",
                    "--temperature",
                    "0",
                    "--ignore-eos",
                    "--logit-bias",
                    "9=100",
                    "--logit-bias",
                    "8=-100",
                    "--presence-penalty",
                    "0.5",
                    "--frequency-penalty",
                    "0.25",
                    "--repetition-penalty",
                    "1.5",
                    "--priority",
                    "-2",
                    "--cache-salt",
                    "me",
                    "--tokens-per-message",
                    "3",
                    "--logprobs",
                    "1",
                    "--json"});
  EXPECT_EQ(generate.Wait(), 0) << generate.err();
  const std::string out = generate.out();
  EXPECT_THAT(out, HasSubstr("\"repetition_penalty\":1.5,\"presence_penalty\":0.5,"
                             "\"frequency_penalty\":0.25"));
  EXPECT_THAT(out, HasSubstr("\"token_ids\":[9,9,9]"));
  EXPECT_THAT(out, HasSubstr("\"chosen\":{\"token_id\":9,"));
}

TEST_F(GoldenSurfaceTest, FrequencyPenaltyCountsTheAnswer) {
  const auto repeats = [&](float penalty) {
    v1::GenerateRequest request = IdsRequest(100);
    request.mutable_sampling()->set_frequency_penalty(penalty);
    Answer answer;
    InferenceClient(serve_.target()).Generate(request, [&](const v1::GenerateResponse& response) {
      answer.Add(response);
      return true;
    });
    EXPECT_EQ(answer.ids.size(), 100u);
    std::map<int32_t, int> counts;
    for (const int32_t id : answer.ids) ++counts[id];
    int most = 0;
    for (const auto& [id, count] : counts) most = std::max(most, count);
    return most;
  };
  const int without = repeats(0.0f);
  EXPECT_LT(repeats(2.0f), without);
  EXPECT_GT(repeats(-2.0f), without);
}

}  // namespace
}  // namespace flashquant
