// Checks of sampling parameters, stop conditions and output options, with the exact outcome of the
// request matrix (R-rows).
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/validation_fixture.h"

namespace flashquant {
namespace {

TEST(SamplingValidationTest, ZeroOutputTokensAreRefused) {  // R15
  v1::GenerateRequest request = TextRequest();
  request.mutable_stop()->set_max_output_tokens(0);
  EXPECT_EQ(Check(request),
            Invalid(reason::kParameterOutOfRange, "stop.max_output_tokens: must be at least 1"));
}

TEST(SamplingValidationTest, MinimumAboveMaximumIsRefused) {  // R17
  v1::GenerateRequest request = TextRequest();
  request.mutable_stop()->set_max_output_tokens(4);
  request.mutable_stop()->set_min_output_tokens(4);
  EXPECT_EQ(Check(request), Outcome{});
  request.mutable_stop()->set_min_output_tokens(5);
  EXPECT_EQ(Check(request), Invalid(reason::kParameterOutOfRange,
                                    "stop.min_output_tokens: above max_output_tokens"));
}

TEST(SamplingValidationTest, TemperatureMustBeWithinZeroAndTwo) {  // R18
  v1::GenerateRequest request = TextRequest();
  constexpr char kText[] = "sampling.temperature: must be within 0 and 2";
  for (const float bad : {-0.1f, 1e30f, 2.0001f, -1e-30f}) {
    request.mutable_sampling()->set_temperature(bad);
    EXPECT_EQ(Check(request), Invalid(reason::kParameterOutOfRange, kText)) << bad;
  }
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    request.mutable_sampling()->set_temperature(bad);
    EXPECT_EQ(Check(request), Invalid(reason::kParameterNotFinite, kText)) << bad;
  }
}

TEST(SamplingValidationTest, TinyAndZeroTemperaturesPass) {  // R19
  v1::GenerateRequest request = TextRequest();
  for (const float good : {0.0f, -0.0f, 1e-9f, 2.0f}) {
    request.mutable_sampling()->set_temperature(good);
    EXPECT_EQ(Check(request), Outcome{}) << good;
  }
}

TEST(SamplingValidationTest, TopPMustBeAboveZeroAndAtMostOne) {  // R20
  v1::GenerateRequest request = TextRequest();
  for (const float bad : {0.0f, -0.5f, 1.0001f, std::nanf("")}) {
    request.mutable_sampling()->set_top_p(bad);
    const Outcome outcome = Check(request);
    EXPECT_EQ(outcome.code, absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(outcome.message, "sampling.top_p: must be above 0 and at most 1");
  }
  request.mutable_sampling()->set_top_p(1.0f);
  EXPECT_EQ(Check(request), Outcome{});
}

TEST(SamplingValidationTest, TopKAboveTheVocabularyIsRefused) {  // R21
  v1::GenerateRequest request = TextRequest();
  request.mutable_sampling()->set_top_k(kVocabulary);
  EXPECT_EQ(Check(request), Outcome{});
  request.mutable_sampling()->set_top_k(kVocabulary + 1);
  EXPECT_EQ(Check(request), Invalid(reason::kParameterOutOfRange,
                                    "sampling.top_k: above vocabulary size (limit 1000)"));
}

TEST(SamplingValidationTest, EveryBadFieldIsReported) {  // R22
  v1::GenerateRequest request = TextRequest();
  v1::SamplingParams* sampling = request.mutable_sampling();
  sampling->set_min_p(1.5f);
  sampling->set_presence_penalty(-2.5f);
  sampling->set_frequency_penalty(std::nanf(""));
  request.mutable_stop()->set_max_output_tokens(0);
  const std::optional<RequestError> error = ValidateGenerate(request, Limits());
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->message, "sampling.min_p: must be within 0 and 1");
  std::vector<std::string> violations;
  for (const FieldViolation& violation : error->violations) {
    violations.push_back(violation.field + ": " + violation.description + " [" + violation.reason +
                         "]");
  }
  EXPECT_THAT(violations,
              ::testing::ElementsAre(
                  "sampling.min_p: must be within 0 and 1 [PARAMETER_OUT_OF_RANGE]",
                  "sampling.presence_penalty: must be within -2 and 2 [PARAMETER_OUT_OF_RANGE]",
                  "sampling.frequency_penalty: must be within -2 and 2 [PARAMETER_NOT_FINITE]",
                  "stop.max_output_tokens: must be at least 1 [PARAMETER_OUT_OF_RANGE]"));
}

TEST(SamplingValidationTest, RepetitionPenaltyMustBeAboveZero) {  // R23
  v1::GenerateRequest request = TextRequest();
  for (const float bad : {0.0f, 1e-40f, -1.0f, 2.5f}) {
    request.mutable_sampling()->set_repetition_penalty(bad);
    EXPECT_EQ(Check(request), Invalid(reason::kParameterOutOfRange,
                                      "sampling.repetition_penalty: must be above 0 and at most 2"))
        << bad;
  }
  for (const float good : {1.17549435e-38f, 0.5f, 1.0f, 2.0f}) {
    request.mutable_sampling()->set_repetition_penalty(good);
    EXPECT_EQ(Check(request), Outcome{}) << good;
  }
}

TEST(SamplingValidationTest, PenaltiesOfTheAnswerMustBeWithinMinusTwoAndTwo) {  // R22
  for (const float good : {-2.0f, -0.0f, 2.0f}) {
    v1::GenerateRequest request = TextRequest();
    request.mutable_sampling()->set_presence_penalty(good);
    request.mutable_sampling()->set_frequency_penalty(-good);
    EXPECT_EQ(Check(request), Outcome{}) << good;
  }
  for (const float bad : {-2.001f, 2.001f, 1e30f}) {
    v1::GenerateRequest request = TextRequest();
    request.mutable_sampling()->set_presence_penalty(bad);
    EXPECT_EQ(Check(request), Invalid(reason::kParameterOutOfRange,
                                      "sampling.presence_penalty: must be within -2 and 2"));
    request = TextRequest();
    request.mutable_sampling()->set_frequency_penalty(bad);
    EXPECT_EQ(Check(request), Invalid(reason::kParameterOutOfRange,
                                      "sampling.frequency_penalty: must be within -2 and 2"));
  }
}

TEST(SamplingValidationTest, LogitBiasIsChecked) {  // R24
  const auto with = [](std::vector<std::pair<uint32_t, float>> entries) {
    v1::GenerateRequest request = TextRequest();
    for (const auto& [id, bias] : entries) {
      v1::LogitBias* entry = request.mutable_sampling()->add_logit_bias();
      entry->set_token_id(id);
      entry->set_bias(bias);
    }
    return Check(request);
  };
  EXPECT_EQ(with({{1000, 1.0f}}),
            Invalid(reason::kLogitBiasInvalid,
                    "sampling.logit_bias[0].token_id: out of range (limit 1000, got 1000)"));
  EXPECT_EQ(with({{5, 1.0f}, {5, 2.0f}}),
            Invalid(reason::kLogitBiasInvalid, "sampling.logit_bias[1].token_id: given twice"));
  EXPECT_EQ(with({{5, std::numeric_limits<float>::infinity()}}),
            Invalid(reason::kLogitBiasInvalid,
                    "sampling.logit_bias[0].bias: must be within -100 and 100"));
  std::vector<std::pair<uint32_t, float>> many;
  for (uint32_t i = 0; i < 65; ++i) many.emplace_back(i, 1.0f);
  EXPECT_EQ(with(many),
            Invalid(reason::kLogitBiasInvalid, "sampling.logit_bias: too many (limit 64, got 65)"));
  many.pop_back();
  EXPECT_EQ(with(many), Outcome{});
  EXPECT_EQ(with({{5, -100.0f}, {6, 100.0f}, {999, -0.0f}}), Outcome{});
  EXPECT_EQ(with({{5, 100.001f}}),
            Invalid(reason::kLogitBiasInvalid,
                    "sampling.logit_bias[0].bias: must be within -100 and 100"));
}

TEST(SamplingValidationTest, StopSequencesAreChecked) {  // R27
  const auto with = [](const std::vector<std::string>& sequences) {
    v1::GenerateRequest request = TextRequest();
    for (const std::string& text : sequences) request.mutable_stop()->add_sequences(text);
    return Check(request);
  };
  EXPECT_EQ(with(std::vector<std::string>(8, "x")), Outcome{});
  EXPECT_EQ(with(std::vector<std::string>(9, "x")),
            Invalid(reason::kTooManyStopSequences, "stop.sequences: too many (limit 8, got 9)"));
  EXPECT_EQ(with({"x", ""}),
            Invalid(reason::kStopSequenceInvalid, "stop.sequences[1]: must not be empty"));
  EXPECT_EQ(with({std::string(128, 'x')}), Outcome{});
  EXPECT_EQ(with({std::string(129, 'x')}),
            Invalid(reason::kStopSequenceInvalid,
                    "stop.sequences[0]: too long (limit 128 bytes, got 129)"));
  EXPECT_EQ(with({"a\xFF"}),
            Invalid(reason::kStopSequenceInvalid, "stop.sequences[0]: not valid UTF-8 at byte 1"));
}

TEST(SamplingValidationTest, StopTokenIdsAreChecked) {  // R28
  v1::GenerateRequest request = TextRequest();
  request.mutable_stop()->add_token_ids(kVocabulary);
  EXPECT_EQ(Check(request), Invalid(reason::kTokenIdOutOfRange,
                                    "stop.token_ids[0]: out of range (limit 1000, got 1000)"));
  request.mutable_stop()->clear_token_ids();
  for (uint32_t i = 0; i < 33; ++i) request.mutable_stop()->add_token_ids(i);
  EXPECT_EQ(Check(request),
            Invalid(reason::kParameterOutOfRange, "stop.token_ids: too many (limit 32, got 33)"));
}

TEST(SamplingValidationTest, TopLogprobsAboveTwentyAreRefused) {  // R29
  v1::GenerateRequest request = TextRequest();
  for (const uint32_t good : {0u, 20u}) {
    request.mutable_output()->set_top_logprobs(good);
    EXPECT_EQ(Check(request), Outcome{});
  }
  request.mutable_output()->set_top_logprobs(21);
  EXPECT_EQ(Check(request), Invalid(reason::kParameterOutOfRange, "output.top_logprobs: above 20"));
}

TEST(SamplingValidationTest, TokensPerMessageHasALimit) {
  v1::GenerateRequest request = TextRequest();
  request.mutable_output()->set_tokens_per_message(256);
  EXPECT_EQ(Check(request), Outcome{});
  request.mutable_output()->set_tokens_per_message(257);
  EXPECT_EQ(Check(request),
            Invalid(reason::kParameterOutOfRange, "output.tokens_per_message: above 256"));
}

}  // namespace
}  // namespace flashquant
