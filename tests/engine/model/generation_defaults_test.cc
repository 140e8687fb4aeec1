// What generation_config.json may say about sampling and the end of an answer.
#include "engine/model/generation_defaults.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

absl::StatusOr<GenerationDefaults> Parse(const char* generation_config, const char* config = "{}") {
  Checkpoint checkpoint;
  checkpoint.config = nlohmann::json::parse(config);
  checkpoint.generation_config = nlohmann::json::parse(generation_config);
  ModelConfig model;
  model.vocab_size = 1000;
  return ParseGenerationDefaults(checkpoint, model);
}

TEST(GenerationDefaultsTest, ValuesOfTheFileAreTaken) {
  const auto defaults = Parse(R"({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05,
                                  "repetition_penalty": 1.05, "eos_token_id": [3, 4]})");
  FQ_ASSERT_OK(defaults);
  EXPECT_EQ(defaults->sampling.temperature, 0.7f);
  EXPECT_EQ(defaults->sampling.top_p, 0.8f);
  EXPECT_EQ(defaults->sampling.top_k, 20);
  EXPECT_EQ(defaults->sampling.min_p, 0.05f);
  EXPECT_EQ(defaults->sampling.repetition_penalty, 1.05f);
  EXPECT_TRUE(defaults->sampling.NeedsTokenCounts());
  EXPECT_THAT(defaults->eos_token_ids, ElementsAre(3, 4));
}

TEST(GenerationDefaultsTest, AnEmptyFileFiltersNothing) {
  const auto defaults = Parse("{}", R"({"eos_token_id": 2})");
  FQ_ASSERT_OK(defaults);
  EXPECT_EQ(defaults->sampling.temperature, 1.0f);
  EXPECT_EQ(defaults->sampling.top_p, 1.0f);
  EXPECT_EQ(defaults->sampling.top_k, 0);
  EXPECT_FALSE(defaults->sampling.NeedsTokenCounts());
  EXPECT_FALSE(defaults->sampling.top_logprobs.has_value());
  EXPECT_THAT(defaults->eos_token_ids, ElementsAre(2));
}

TEST(GenerationDefaultsTest, ValuesOutOfRangeAreRefusedByName) {
  for (const auto& [file, key] :
       {std::pair{R"({"temperature": 2.5})", "temperature"}, std::pair{R"({"top_p": 0})", "top_p"},
        std::pair{R"({"top_k": 1001})", "top_k"}, std::pair{R"({"min_p": -0.1})", "min_p"},
        std::pair{R"({"repetition_penalty": 0})", "repetition_penalty"},
        std::pair{R"({"repetition_penalty": 2.1})", "repetition_penalty"},
        std::pair{R"({"eos_token_id": 1000})", "eos_token_id"}}) {
    EXPECT_THAT(Parse(file), StatusIs(absl::StatusCode::kDataLoss, HasSubstr(key))) << file;
  }
}

}  // namespace
}  // namespace flashquant
