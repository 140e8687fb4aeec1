// Checks of prompts, ids and scheduling fields of a request, with the exact outcome of the request
// matrix (R-rows). Sampling and stops: sampling_validation_test.cc.
#include "server/request_validation.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/validation_fixture.h"

namespace flashquant {
namespace {

using ::testing::HasSubstr;

TEST(RequestValidationTest, PlainRequestPasses) { EXPECT_EQ(Check(TextRequest()), Outcome{}); }

TEST(RequestValidationTest, MissingPromptIsRefused) {  // R1
  EXPECT_EQ(Check({}), Invalid(reason::kEmptyPrompt, "prompt: required"));
}

TEST(RequestValidationTest, EmptyPromptIsRefused) {  // R2
  v1::GenerateRequest text;
  text.set_text("");
  EXPECT_EQ(Check(text), Invalid(reason::kEmptyPrompt, "prompt: must not be empty"));
  v1::GenerateRequest ids;
  ids.mutable_token_ids();
  EXPECT_EQ(Check(ids), Invalid(reason::kEmptyPrompt, "prompt: must not be empty"));
  v1::GenerateRequest chat;
  chat.mutable_chat();
  EXPECT_EQ(Check(chat), Invalid(reason::kEmptyPrompt, "prompt: must not be empty"));
}

TEST(RequestValidationTest, TextUpToOneMebibytePasses) {  // R4
  v1::GenerateRequest request;
  request.set_text(std::string(1 << 20, 'a'));
  EXPECT_EQ(Check(request), Outcome{});
  request.mutable_text()->push_back('a');
  EXPECT_EQ(Check(request), Invalid(reason::kPromptTooLong,
                                    "prompt.text: too long (limit 1048576 bytes, got 1048577)"));
}

TEST(RequestValidationTest, InvalidUtf8IsNamedByItsByte) {  // R5
  v1::GenerateRequest request;
  request.set_text("ab\xC3\xA9\xC3(");
  EXPECT_EQ(Check(request),
            Invalid(reason::kInvalidUtf8, "prompt.text: not valid UTF-8 at byte 4"));
  for (const char* bad : {"\x80", "\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80",
                          "\xF5\x80\x80\x80", "\xE2\x82", "\xFF"}) {
    request.set_text(bad);
    EXPECT_EQ(Check(request),
              Invalid(reason::kInvalidUtf8, "prompt.text: not valid UTF-8 at byte 0"));
  }
}

TEST(RequestValidationTest, UnusualButValidTextPasses) {  // R6
  v1::GenerateRequest request;
  request.set_text(std::string("\0\x01\x7F\xEF\xBB\xBF\xE2\x80\x8F\xF4\x8F\xBF\xBF", 13));
  EXPECT_EQ(Check(request), Outcome{});
}

TEST(RequestValidationTest, TokenIdsMustBeBelowTheVocabulary) {  // R8
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(kVocabulary - 1);
  EXPECT_EQ(Check(request), Outcome{});
  request.mutable_token_ids()->add_ids(kVocabulary);
  EXPECT_EQ(Check(request), Invalid(reason::kTokenIdOutOfRange,
                                    "prompt.token_ids[1]: out of range (limit 1000, got 1000)"));
  request.mutable_token_ids()->set_ids(1, 4294967295u);
  EXPECT_EQ(Check(request),
            Invalid(reason::kTokenIdOutOfRange,
                    "prompt.token_ids[1]: out of range (limit 1000, got 4294967295)"));
}

TEST(RequestValidationTest, RequestIdHasAFixedAlphabet) {  // R30
  v1::GenerateRequest request = TextRequest();
  request.set_request_id("Abc-1_2.z" + std::string(55, 'x'));
  EXPECT_EQ(Check(request), Outcome{});
  for (const std::string& bad :
       {std::string(65, 'x'), std::string("a b"), std::string("a\nb"), std::string("\xC3\xA9")}) {
    request.set_request_id(bad);
    const Outcome outcome = Check(request);
    EXPECT_EQ(outcome, Invalid(reason::kRequestIdInvalid,
                               "request_id: must be at most 64 letters, digits, '.', '_' or '-'"));
    EXPECT_EQ(outcome.message.find('\n'), std::string::npos);
  }
}

TEST(RequestValidationTest, UnknownModelIsNotEchoed) {  // R33
  v1::GenerateRequest request = TextRequest();
  request.set_model("tiny");
  EXPECT_EQ(Check(request), Outcome{});
  request.set_model("secret\n" + std::string(1000, 'x'));
  EXPECT_EQ(Check(request),
            (Outcome{absl::StatusCode::kNotFound, reason::kModelNotFound, "model: unknown"}));
}

TEST(RequestValidationTest, PriorityHasARange) {  // R34
  v1::GenerateRequest request = TextRequest();
  for (const int bad : {11, -11}) {
    request.set_priority(bad);
    EXPECT_EQ(Check(request),
              Invalid(reason::kParameterOutOfRange, "priority: must be within -10 and 10"));
  }
  for (const int good : {10, 0, -10}) {
    request.set_priority(good);
    EXPECT_EQ(Check(request), Outcome{});
  }
}

TEST(RequestValidationTest, CacheSaltHasALimit) {
  v1::GenerateRequest request = TextRequest();
  request.set_cache_salt(std::string(64, 's'));
  EXPECT_EQ(Check(request), Outcome{});
  request.set_cache_salt(std::string(65, 's'));
  EXPECT_EQ(Check(request),
            Invalid(reason::kParameterOutOfRange, "cache_salt: too long (limit 64 bytes, got 65)"));
}

TEST(RequestValidationTest, AbsurdQueueTimeoutsAreRefused) {  // R35
  v1::GenerateRequest request = TextRequest();
  const auto with = [&](int64_t seconds, int32_t nanos) {
    request.mutable_queue_timeout()->set_seconds(seconds);
    request.mutable_queue_timeout()->set_nanos(nanos);
    return Check(request);
  };
  const Outcome refused =
      Invalid(reason::kParameterOutOfRange, "queue_timeout: must be within 0 and 86400 s");
  EXPECT_EQ(with(0, -1), refused);
  EXPECT_EQ(with(-1, 0), refused);
  EXPECT_EQ(with(1000000000000, 0), refused);
  EXPECT_EQ(with(std::numeric_limits<int64_t>::min(), std::numeric_limits<int32_t>::min()),
            refused);
  EXPECT_EQ(with(86400, 0), Outcome{});
}

TEST(RequestValidationTest, UnknownFieldsAreIgnored) {  // R36
  v1::GenerateRequest request = TextRequest();
  request.GetReflection()->MutableUnknownFields(&request)->AddVarint(999, 1);
  EXPECT_EQ(Check(request), Outcome{});
}

TEST(RequestValidationTest, FieldsNotBuiltAreNamed) {  // R37
  const auto with = [](auto set) {
    v1::GenerateRequest request = TextRequest();
    set(request);
    return Check(request);
  };
  EXPECT_EQ(with([](auto& r) { r.GetReflection()->MutableUnknownFields(&r)->AddVarint(13, 1); }),
            NotBuilt("field 13"));
  EXPECT_EQ(with([](auto& r) { r.GetReflection()->MutableUnknownFields(&r)->AddVarint(12, 1); }),
            NotBuilt("field 12"));
  // All that the proto names is built.
  EXPECT_EQ(with([](auto& r) {
              r.mutable_sampling()->set_repetition_penalty(1.1f);
              r.mutable_sampling()->set_presence_penalty(0.5f);
              r.mutable_sampling()->set_frequency_penalty(-0.5f);
              r.mutable_sampling()->add_logit_bias()->set_bias(1.0f);
              r.mutable_output()->set_top_logprobs(3);
              r.mutable_output()->set_tokens_per_message(4);
              r.set_priority(2);
              r.set_cache_salt("tenant");
            }),
            Outcome{});
}

TEST(RequestValidationTest, WrongValuesMatterMoreThanMissingFeatures) {
  v1::GenerateRequest request = TextRequest();
  request.GetReflection()->MutableUnknownFields(&request)->AddVarint(13, 1);
  request.mutable_sampling()->set_top_p(2.0f);
  EXPECT_EQ(Check(request),
            Invalid(reason::kParameterOutOfRange, "sampling.top_p: must be above 0 and at most 1"));
}

TEST(RequestValidationTest, TextNeedsATokenizer) {
  RequestLimits limits = Limits();
  limits.has_tokenizer = false;
  limits.has_chat_format = false;
  EXPECT_EQ(Check(TextRequest(), limits).message,
            "prompt.text: this model has no tokenizer, send token_ids");
  v1::GenerateRequest ids;
  ids.mutable_token_ids()->add_ids(1);
  EXPECT_EQ(Check(ids, limits), Outcome{});
  ids.mutable_stop()->add_sequences("x");
  EXPECT_EQ(Check(ids, limits).code, absl::StatusCode::kUnimplemented);
}

TEST(RequestValidationTest, ChatWithoutAFormatSaysWhy) {
  RequestLimits limits = Limits();
  limits.has_chat_format = false;
  v1::GenerateRequest request;
  v1::ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("Hi");
  EXPECT_EQ(Check(request, limits).message, "prompt.chat: this model has no chat format");
  limits.chat_refusal = "the model's chat template is another";
  EXPECT_EQ(Check(request, limits).code, absl::StatusCode::kUnimplemented);
  EXPECT_EQ(Check(request, limits).message, "prompt.chat: the model's chat template is another");
}

TEST(RequestValidationTest, ChatRolesAndSizesAreChecked) {
  v1::GenerateRequest request;
  v1::ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("hi");
  EXPECT_EQ(Check(request), Outcome{});
  message->set_role("tool");
  EXPECT_EQ(Check(request), Invalid(reason::kChatInvalid,
                                    "prompt.chat.messages[0].role: must be system, user or "
                                    "assistant"));
  message->set_role("user");
  message->set_content(std::string((1 << 19) + 1, 'x'));
  *request.mutable_chat()->add_messages() = *message;
  EXPECT_EQ(Check(request), Invalid(reason::kPromptTooLong,
                                    "prompt.chat: too long (limit 1048576 bytes, got 1048578)"));
}

TEST(RequestValidationTest, ManyViolationsAreCut) {
  v1::GenerateRequest request = TextRequest();
  for (int i = 0; i < 32; ++i) request.mutable_stop()->add_token_ids(5000);
  const std::optional<RequestError> error = ValidateGenerate(request, Limits());
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->violations.size(), 16u);
}

TEST(RequestValidationTest, DetokenizeChecksIds) {  // R41
  v1::DetokenizeRequest request;
  request.add_token_ids(1);
  EXPECT_FALSE(ValidateDetokenize(request, Limits()).has_value());
  request.add_token_ids(kVocabulary);
  const std::optional<RequestError> error = ValidateDetokenize(request, Limits());
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->reason, reason::kTokenIdOutOfRange);
  EXPECT_EQ(error->message, "token_ids[1]: out of range (limit 1000, got 1000)");
}

TEST(RequestValidationTest, TokenizeTakesOneMebibyte) {  // R41
  v1::TokenizeRequest request;
  request.set_text(std::string(1 << 20, ' '));
  EXPECT_FALSE(ValidateTokenize(request, Limits()).has_value());
  request.mutable_text()->push_back(' ');
  const std::optional<RequestError> error = ValidateTokenize(request, Limits());
  ASSERT_TRUE(error.has_value());
  EXPECT_THAT(error->message, HasSubstr("limit 1048576 bytes"));
}

}  // namespace
}  // namespace flashquant
