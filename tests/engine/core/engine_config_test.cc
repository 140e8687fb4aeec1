// Ranges of the engine's options.
#include "engine/engine_config.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::StrEq;

struct BadValue {
  int32_t EngineConfig::*key;
  int32_t value;
  std::string text;
};

TEST(EngineConfigTest, TheDefaultsAreValid) { FQ_EXPECT_OK(EngineConfig().Validate()); }

TEST(EngineConfigTest, NamesTheKeyTheRangeAndTheValue) {
  const BadValue bad_values[] = {
      {&EngineConfig::context_length, -1, "context_length: must be within 0 and 16777216 (got -1)"},
      {&EngineConfig::max_sequences, 0, "max_sequences: must be within 1 and 4096 (got 0)"},
      {&EngineConfig::token_budget, 0, "token_budget: must be within 1 and 131072 (got 0)"},
      {&EngineConfig::max_waiting, 0, "max_waiting: must be within 1 and 1048576 (got 0)"},
      {&EngineConfig::block_tokens, 2000, "block_tokens: must be within 1 and 256 (got 2000)"},
      {&EngineConfig::num_blocks, -7, "num_blocks: must be within 0 and 67108864 (got -7)"},
      {&EngineConfig::num_blocks, 1, "num_blocks: must be 0 or at least 2 (got 1)"},
      {&EngineConfig::row_multiple, 4097, "row_multiple: must be within 1 and 4096 (got 4097)"},
      {&EngineConfig::token_budget, 63,
       "token_budget: must be at least max_sequences (limit 64, got 63)"},
  };
  for (const BadValue& bad : bad_values) {
    EngineConfig config;
    config.*bad.key = bad.value;
    EXPECT_THAT(config.Validate(),
                StatusIs(absl::StatusCode::kFailedPrecondition, StrEq(bad.text)));
  }
}

TEST(EngineConfigTest, PatienceIsBounded) {
  EngineConfig config;
  config.prompt_patience = 1000.5;
  EXPECT_THAT(config.Validate(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       StrEq("prompt_patience: must be within 0 and 1000 (got 1000.5)")));
}

}  // namespace
}  // namespace flashquant
