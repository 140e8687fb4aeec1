// Prompt to ids, effective values, and the limits that depend on the prompt's length.
#include "server/request_mapping.h"

#include <chrono>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashquant {
namespace {

using ::testing::ElementsAre;
using namespace std::chrono_literals;

// One token per byte, id = byte; 'z' gives nothing. BOS is 256.
class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<int32_t> Encode(std::string_view text, SpecialText special) const override {
    EXPECT_EQ(special, SpecialText::kPlain);
    std::vector<int32_t> ids;
    for (const char c : text) {
      if (c != 'z') ids.push_back(static_cast<unsigned char>(c));
    }
    return ids;
  }
  std::string_view TokenBytes(int32_t) const override { return "x"; }
  bool IsSpecial(int32_t id) const override { return id >= 256; }
  std::optional<int32_t> TokenId(std::string_view) const override { return std::nullopt; }
  int32_t vocab_size() const override { return 258; }
  std::optional<int32_t> prompt_bos() const override { return 256; }
  std::optional<int32_t> bos() const override { return 256; }
  std::optional<int32_t> eos() const override { return 257; }
};

class RequestMappingTest : public ::testing::Test {
 protected:
  RequestMappingTest() {
    options_.limits.model_name = "tiny";
    options_.limits.vocab_size = 258;
    options_.limits.context_length = 16;
    options_.tokenizer = &tokenizer_;
    options_.defaults.temperature = 0.8f;
    options_.defaults.top_p = 0.95f;
    options_.max_request_duration = 600s;
    options_.default_queue_timeout = 30s;
    options_.random = [this] { return next_random_++; };
    times_.now = TimePoint(1000s);
  }

  std::optional<RequestError> Map(const v1::GenerateRequest& request) {
    const RequestMapper mapper(options_);
    std::vector<int32_t> prompt;
    if (std::optional<RequestError> error = mapper.EncodePrompt(request, &prompt)) return error;
    return mapper.Build(request, std::move(prompt), times_, &mapped_);
  }
  v1::GenerateRequest Ids(int count) {
    v1::GenerateRequest request;
    for (int i = 0; i < count; ++i) request.mutable_token_ids()->add_ids(1);
    return request;
  }

  ByteTokenizer tokenizer_;
  MapperOptions options_;
  uint64_t next_random_ = 77;
  CallTimes times_;
  MappedRequest mapped_;
};

TEST_F(RequestMappingTest, TextGetsBosAndIdsDoNot) {
  v1::GenerateRequest request;
  request.set_text("ab");
  ASSERT_FALSE(Map(request).has_value());
  EXPECT_THAT(mapped_.request.prompt_tokens, ElementsAre(256, 'a', 'b'));
  ASSERT_FALSE(Map(Ids(2)).has_value());
  EXPECT_THAT(mapped_.request.prompt_tokens, ElementsAre(1, 1));
}

TEST_F(RequestMappingTest, TextThatGivesNoTokenIsRefused) {  // R3
  v1::GenerateRequest request;
  request.set_text("zz");
  const std::optional<RequestError> error = Map(request);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->reason, reason::kEmptyPrompt);
  EXPECT_EQ(error->message, "prompt: must not be empty");
}

TEST_F(RequestMappingTest, TextThatSpellsASpecialTokenIsPlain) {  // R7
  v1::GenerateRequest request;
  request.set_text("<eos>");
  ASSERT_FALSE(Map(request).has_value());  // the tokenizer itself checks the mode
  EXPECT_EQ(mapped_.request.prompt_tokens.size(), 6u);
}

TEST_F(RequestMappingTest, PromptThatFillsTheContextIsRefused) {  // R10
  const std::optional<RequestError> error = Map(Ids(16));
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(error->reason, reason::kContextLengthExceeded);
  EXPECT_EQ(error->message, "prompt: no room for output (context 16, prompt 16)");
}

TEST_F(RequestMappingTest, AskedOutputThatDoesNotFitIsRefused) {  // R11
  v1::GenerateRequest request = Ids(10);
  request.mutable_stop()->set_max_output_tokens(6);
  EXPECT_FALSE(Map(request).has_value());
  request.mutable_stop()->set_max_output_tokens(7);
  const std::optional<RequestError> error = Map(request);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->reason, reason::kContextLengthExceeded);
  EXPECT_EQ(error->message, "prompt + max_output_tokens: exceeds context (limit 16, got 17)");
  ASSERT_EQ(error->violations.size(), 1u);
  EXPECT_EQ(error->violations[0].field, "stop.max_output_tokens");
}

TEST_F(RequestMappingTest, UnsetOutputLimitIsWhatFits) {  // R12
  ASSERT_FALSE(Map(Ids(10)).has_value());
  EXPECT_EQ(mapped_.request.stop.max_output_tokens, 6);
  EXPECT_TRUE(mapped_.request.stop.limited_by_context);
}

TEST_F(RequestMappingTest, GreatestOutputLimitDoesNotWrap) {  // R16
  v1::GenerateRequest request = Ids(10);
  request.mutable_stop()->set_max_output_tokens(4294967295u);
  const std::optional<RequestError> error = Map(request);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->message,
            "prompt + max_output_tokens: exceeds context (limit 16, got 4294967305)");
}

TEST_F(RequestMappingTest, MinimumAboveWhatFitsIsRefused) {  // R17
  v1::GenerateRequest request = Ids(10);
  request.mutable_stop()->set_min_output_tokens(7);
  const std::optional<RequestError> error = Map(request);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->message, "stop.min_output_tokens: above max_output_tokens");
}

// That they are greedy is the backend's rule.
TEST_F(RequestMappingTest, TinyTemperaturesArePassedOn) {  // R19
  v1::GenerateRequest request = Ids(1);
  for (const float value : {0.0f, 1e-9f}) {
    request.mutable_sampling()->set_temperature(value);
    ASSERT_FALSE(Map(request).has_value());
    EXPECT_EQ(mapped_.request.sampling.temperature, value);
  }
}

TEST_F(RequestMappingTest, SeedsAreKeptOrDrawnAndReported) {  // R26
  v1::GenerateRequest request = Ids(1);
  for (const uint64_t seed : {uint64_t{0}, ~uint64_t{0}}) {
    request.mutable_sampling()->set_seed(seed);
    ASSERT_FALSE(Map(request).has_value());
    EXPECT_EQ(mapped_.request.sampling.seed, seed);
    EXPECT_EQ(RequestMapper(options_).MakeAccepted(mapped_.request).seed(), seed);
  }
  request.mutable_sampling()->clear_seed();
  next_random_ = 500;
  ASSERT_FALSE(Map(request).has_value());
  EXPECT_GE(mapped_.request.sampling.seed, 500u);
}

TEST_F(RequestMappingTest, UnsetSamplingComesFromTheModel) {
  v1::GenerateRequest request = Ids(1);
  request.mutable_sampling()->set_top_p(0.5f);
  ASSERT_FALSE(Map(request).has_value());
  EXPECT_EQ(mapped_.request.sampling.temperature, 0.8f);
  EXPECT_EQ(mapped_.request.sampling.top_p, 0.5f);
  const v1::Accepted accepted = RequestMapper(options_).MakeAccepted(mapped_.request);
  EXPECT_EQ(accepted.sampling().temperature(), 0.8f);
  EXPECT_EQ(accepted.max_output_tokens(), 15u);
  EXPECT_EQ(accepted.model(), "tiny");
}

TEST_F(RequestMappingTest, MissingRequestIdIsMade) {
  ASSERT_FALSE(Map(Ids(1)).has_value());
  EXPECT_EQ(mapped_.request.request_id, "000000000000004d");
  v1::GenerateRequest request = Ids(1);
  request.set_request_id("mine");
  ASSERT_FALSE(Map(request).has_value());
  EXPECT_EQ(mapped_.request.request_id, "mine");
}

TEST_F(RequestMappingTest, ServerMaximumBoundsTheDeadline) {  // N4
  ASSERT_FALSE(Map(Ids(1)).has_value());
  EXPECT_EQ(mapped_.request.deadline, times_.now + 600s);
  times_.client_deadline = times_.now + 5s;
  ASSERT_FALSE(Map(Ids(1)).has_value());
  EXPECT_EQ(mapped_.request.deadline, times_.now + 5s);
  times_.client_deadline = times_.now + 1000000s;
  ASSERT_FALSE(Map(Ids(1)).has_value());
  EXPECT_EQ(mapped_.request.deadline, times_.now + 600s);
}

// The cause of cancels that were counted as the client's although its deadline had passed.
TEST(CancelReasonTest, ResetJustBeforeTheDeadlineIsTheDeadlines) {  // N3
  const TimePoint arrival{1000s};
  const auto is_deadline = [&](Duration timeout, Duration after) {
    return CancelIsDeadline(arrival, arrival + timeout, arrival + after);
  };
  EXPECT_TRUE(is_deadline(300ms, 300ms));
  EXPECT_TRUE(is_deadline(300ms, 250ms));
  EXPECT_FALSE(is_deadline(300ms, 200ms));
  EXPECT_TRUE(is_deadline(100s, 99s));  // 1% of rounding
  EXPECT_FALSE(is_deadline(100s, 97s));
  EXPECT_TRUE(is_deadline(4ms, 3ms));
  EXPECT_FALSE(is_deadline(4ms, 2ms));
}

TEST_F(RequestMappingTest, PastDeadlineIsRefused) {  // N3
  times_.client_deadline = times_.now;
  const std::optional<RequestError> error = Map(Ids(1));
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code, absl::StatusCode::kDeadlineExceeded);
}

TEST_F(RequestMappingTest, QueueTimeoutIsTheClientsOrTheServers) {
  v1::GenerateRequest request = Ids(1);
  ASSERT_FALSE(Map(request).has_value());
  EXPECT_EQ(mapped_.request.queue_deadline, times_.now + 30s);
  request.mutable_queue_timeout()->set_nanos(500000000);
  ASSERT_FALSE(Map(request).has_value());
  EXPECT_EQ(mapped_.request.queue_deadline, times_.now + 500ms);
}

TEST_F(RequestMappingTest, PenaltiesAndBiasesReachTheEngineAndAreReported) {
  options_.defaults.repetition_penalty = 1.25f;
  v1::GenerateRequest request = Ids(1);
  ASSERT_FALSE(Map(request).has_value());
  EXPECT_EQ(mapped_.request.sampling.repetition_penalty, 1.25f);
  EXPECT_EQ(mapped_.request.sampling.presence_penalty, 0.0f);
  v1::SamplingParams* sampling = request.mutable_sampling();
  sampling->set_repetition_penalty(1.0f);
  sampling->set_presence_penalty(0.5f);
  sampling->set_frequency_penalty(-1.5f);
  v1::LogitBias* bias = sampling->add_logit_bias();
  bias->set_token_id(200);
  bias->set_bias(-3.0f);
  ASSERT_FALSE(Map(request).has_value());
  const SamplingParams& mapped = mapped_.request.sampling;
  EXPECT_EQ(mapped.repetition_penalty, 1.0f);
  EXPECT_EQ(mapped.presence_penalty, 0.5f);
  EXPECT_EQ(mapped.frequency_penalty, -1.5f);
  ASSERT_EQ(mapped.logit_bias.size(), 1u);
  EXPECT_EQ(mapped.logit_bias[0].token_id, 200);
  EXPECT_EQ(mapped.logit_bias[0].bias, -3.0f);
  const v1::Accepted accepted = RequestMapper(options_).MakeAccepted(mapped_.request);
  EXPECT_EQ(accepted.sampling().repetition_penalty(), 1.0f);
  EXPECT_EQ(accepted.sampling().presence_penalty(), 0.5f);
  EXPECT_EQ(accepted.sampling().frequency_penalty(), -1.5f);
}

TEST_F(RequestMappingTest, LogprobsAreAskedForOnlyWhenTheFieldIsSet) {
  v1::GenerateRequest request = Ids(1);
  ASSERT_FALSE(Map(request).has_value());
  EXPECT_FALSE(mapped_.request.sampling.top_logprobs.has_value());
  EXPECT_EQ(mapped_.output.tokens_per_message, 0);
  for (const uint32_t number : {0u, 20u}) {
    request.mutable_output()->set_top_logprobs(number);
    request.mutable_output()->set_tokens_per_message(7);
    ASSERT_FALSE(Map(request).has_value());
    EXPECT_EQ(mapped_.request.sampling.top_logprobs, static_cast<int32_t>(number));
    EXPECT_EQ(mapped_.output.tokens_per_message, 7);
  }
}

TEST_F(RequestMappingTest, PriorityAndCacheSaltReachTheEngine) {
  v1::GenerateRequest request = Ids(1);
  ASSERT_FALSE(Map(request).has_value());
  EXPECT_EQ(mapped_.request.priority, 0);
  EXPECT_EQ(mapped_.request.cache_salt, "");
  request.set_priority(-7);
  request.set_cache_salt("tenant");
  ASSERT_FALSE(Map(request).has_value());
  EXPECT_EQ(mapped_.request.priority, -7);
  EXPECT_EQ(mapped_.request.cache_salt, "tenant");
}

TEST_F(RequestMappingTest, ChatErrorsAreChatInvalid) {
  options_.encode_chat = [](const v1::ChatPrompt&) {
    return absl::InvalidArgumentError("system must come first");
  };
  v1::GenerateRequest request;
  request.mutable_chat()->add_messages();
  const std::optional<RequestError> error = Map(request);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->reason, reason::kChatInvalid);
  EXPECT_EQ(error->message, "prompt.chat: system must come first");
}

TEST(MakeFinishedTest, TellsWhatMatchedAndCounts) {
  StopConditions stop;
  stop.sequences = {"a", "END"};
  FinishedEvent event;
  event.reason = FinishReason::kStopSequence;
  event.matched_sequence = 1;
  event.usage.prompt_tokens = 3;
  event.usage.output_tokens = 4;
  event.timing.queue = 1500ms;
  v1::Finished finished = MakeFinished(event, stop);
  EXPECT_EQ(finished.reason(), v1::FINISH_REASON_STOP_SEQUENCE);
  EXPECT_EQ(finished.sequence(), "END");
  EXPECT_EQ(finished.usage().output_tokens(), 4u);
  EXPECT_EQ(finished.timing().queue().seconds(), 1);
  EXPECT_EQ(finished.timing().queue().nanos(), 500000000);
  event.matched_sequence.reset();
  event.matched_token = 7;
  event.reason = FinishReason::kEos;
  finished = MakeFinished(event, stop);
  EXPECT_EQ(finished.reason(), v1::FINISH_REASON_EOS);
  EXPECT_EQ(finished.token_id(), 7u);
}

}  // namespace
}  // namespace flashquant
