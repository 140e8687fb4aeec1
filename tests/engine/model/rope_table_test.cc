// Rotary tables against values worked out from the published formulas.
#include "engine/model/rope_table.h"

#include <gtest/gtest.h>

#include <cmath>

namespace flashquant {
namespace {

TEST(RopeTableTest, DefaultFrequenciesFallGeometrically) {
  const std::vector<float> frequencies = RopeInverseFrequencies({.theta = 10000.0}, 8);
  ASSERT_EQ(frequencies.size(), 4u);
  EXPECT_FLOAT_EQ(frequencies[0], 1.0f);
  EXPECT_FLOAT_EQ(frequencies[1], 0.1f);
  EXPECT_FLOAT_EQ(frequencies[2], 0.01f);
  EXPECT_FLOAT_EQ(frequencies[3], 0.001f);
}

TEST(RopeTableTest, LinearScalingDividesEveryFrequency) {
  const std::vector<float> frequencies =
      RopeInverseFrequencies({.type = RopeType::kLinear, .theta = 10000.0, .factor = 4.0}, 8);
  EXPECT_FLOAT_EQ(frequencies[0], 0.25f);
  EXPECT_FLOAT_EQ(frequencies[3], 0.00025f);
}

// Published: theta * (factor * length / max_position - (factor - 1)) ^ (d / (d - 2)) for a text of
// `length` beyond max_position; we run none, so theta stays.
TEST(RopeTableTest, DynamicScalingLeavesTheModelsOwnContextAsItIs) {
  const std::vector<float> frequencies =
      RopeInverseFrequencies({.type = RopeType::kDynamic, .theta = 10000.0, .factor = 4.0}, 8);
  const double factor_at_max_position = 4.0 * 1.0 - (4.0 - 1.0);
  const double theta = 10000.0 * std::pow(factor_at_max_position, 8.0 / 6.0);
  for (size_t pair = 0; pair < 4; ++pair) {
    EXPECT_FLOAT_EQ(frequencies[pair],
                    static_cast<float>(std::pow(theta, -static_cast<double>(pair) / 4.0)));
  }
}

// Wave lengths for theta 10000 and 8 dimensions: 6.28, 62.8, 628, 6283 tokens. With original 1024,
// low 1 and high 4: below 256 unchanged, above 1024 divided, and 628 blended.
TEST(RopeTableTest, Llama3KeepsShortWavesStretchesLongOnesAndBlendsBetween) {
  const RopeConfig rope = {.type = RopeType::kLlama3,
                           .theta = 10000.0,
                           .factor = 8.0,
                           .low_freq_factor = 1.0,
                           .high_freq_factor = 4.0,
                           .original_max_position = 1024};
  const std::vector<float> frequencies = RopeInverseFrequencies(rope, 8);
  EXPECT_FLOAT_EQ(frequencies[0], 1.0f);
  EXPECT_FLOAT_EQ(frequencies[1], 0.1f);
  EXPECT_FLOAT_EQ(frequencies[3], 0.001f / 8.0f);
  const double smooth = (1024.0 / (2.0 * M_PI / 0.01) - 1.0) / 3.0;
  EXPECT_FLOAT_EQ(frequencies[2], static_cast<float>((1 - smooth) * 0.01 / 8 + smooth * 0.01));
}

// transformers' _compute_yarn_parameters, evaluated for these numbers: the range from 0 to 3.
TEST(RopeTableTest, YarnKeepsFastPairsStretchesSlowOnesAndBlendsBetween) {
  const RopeConfig rope = {
      .type = RopeType::kYarn, .theta = 10000.0, .factor = 4.0, .original_max_position = 64};
  const std::vector<float> frequencies = RopeInverseFrequencies(rope, 16);
  const std::vector<float> expected = {1.0f,    0.237170825f,    0.05f,    0.00790569415f,
                                       0.0025f, 0.000790569415f, 0.00025f, 7.90569415e-05f};
  ASSERT_EQ(frequencies.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_FLOAT_EQ(frequencies[i], expected[i]) << i;
}

TEST(RopeTableTest, AModelsTableHasItsAttentionFactorAndOptDoesNotTurn) {
  ModelConfig config;
  config.head_dim = 4;
  config.rope.attention_factor = 1.5;
  EXPECT_FLOAT_EQ(MakeRopeTable(config, 2)[4], 1.5f * std::cos(1.0f));
  config.family = DecoderFamily::kOpt;
  EXPECT_EQ(MakeRopeTable(config, 2), std::vector<float>({1, 1, 0, 0, 1, 1, 0, 0}));
}

TEST(RopeTableTest, RowsHoldCosinesThenSines) {
  const std::vector<float> table = MakeRopeTable(RopeInverseFrequencies({.theta = 100.0}, 4), 3);
  ASSERT_EQ(table.size(), 12u);
  EXPECT_EQ(table[0], 1.0f);
  EXPECT_EQ(table[2], 0.0f);
  EXPECT_FLOAT_EQ(table[8], std::cos(2.0f));
  EXPECT_FLOAT_EQ(table[9], std::cos(0.2f));
  EXPECT_FLOAT_EQ(table[10], std::sin(2.0f));
  EXPECT_FLOAT_EQ(table[11], std::sin(0.2f));
}

}  // namespace
}  // namespace flashquant
