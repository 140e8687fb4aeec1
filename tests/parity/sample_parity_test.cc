// Sampling against the oracle's probabilities: a chi-square test with fixed seeds, and the cases
// that other servers got wrong (reliability rows R19, R25, T12, T13).
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/parity/sampling_fixture.h"
#include "tests/support/random_weights.h"
#include "tests/support/reference_ops.h"

namespace flashquant {
namespace {

using SampleParityTest = SamplingParityTest;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST_P(SampleParityTest, DrawsFollowTheOraclesProbabilities) {
  const std::vector<float> logits = RandomFloats(300, 2.0f, 11);
  ExpectDistribution(logits, Row(1.0f), 4000);
  ExpectDistribution(logits, Row(0.6f), 4000);
  ExpectDistribution(logits, Row(1.7f, 20), 4000);
  ExpectDistribution(logits, Row(1.0f, 0, 0.9f), 4000);
  ExpectDistribution(logits, Row(1.0f, 0, 0.999f), 4000);
  ExpectDistribution(logits, Row(1.0f, 0, 1.0f, 0.1f), 4000);
  ExpectDistribution(logits, Row(1.2f, 50, 0.8f, 0.05f), 4000);
  ExpectDistribution(logits, Row(1.0f, 1), 100);
  ExpectDistribution(logits, Row(1.0f, 0, 1e-6f), 100);
  ExpectDistribution(logits, Row(1.0f, 1000), 4000);
}

TEST_P(SampleParityTest, TheTestRefusesAWrongTemperature) {
  const std::vector<float> logits = RandomFloats(50, 2.0f, 11);
  std::vector<SampleRow> rows;
  for (int i = 0; i < 4000; ++i) {
    rows.push_back(Row(1.2f));
    rows.back().output_position = i;
  }
  const Draws draws = Sample(logits, rows, 50);
  const std::vector<double> expected = ReferenceTokenProbabilities(logits, Row(1.0f), {});
  std::vector<int> counts(50);
  for (const int32_t id : draws.token_ids) ++counts[static_cast<size_t>(id)];
  double chi_square = 0.0;
  for (size_t id = 0; id < 50; ++id) {
    const double mean = expected[id] * 4000;
    chi_square += (counts[id] - mean) * (counts[id] - mean) / mean;
  }
  EXPECT_GT(chi_square, 50 + 4.0 * std::sqrt(100.0));
}

TEST_P(SampleParityTest, AllLogitsEqualIsUniform) {
  for (const float level : {0.0f, -1e30f, 3e38f}) {
    const std::vector<float> logits(40, level);
    ExpectDistribution(logits, Row(1.0f), 4000);
    ExpectDistribution(logits, Row(0.001f), 4000);
    ExpectDistribution(logits, Row(1.0f, 0, 0.5f), 4000);
  }
  std::vector<SampleRow> rows;
  for (int i = 0; i < 200; ++i) {
    rows.push_back(Row(1.0f));
    rows.back().seed = static_cast<uint64_t>(i);
  }
  for (const int32_t id : Sample(std::vector<float>(7, 1.0f), rows, 7).token_ids) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, 7);
  }
}

TEST_P(SampleParityTest, ZeroNegativeZeroAndTinyTemperaturesAreGreedy) {
  std::vector<float> logits = RandomFloats(1000, 5.0f, 3);
  logits[700] = logits[300] = 50.0f;
  for (const float temperature : {0.0f, -0.0f, 1e-9f, 1e-45f}) {
    EXPECT_EQ(SampleOne(logits, Row(temperature)), 300) << temperature;
    EXPECT_EQ(SampleOne(logits, Row(temperature, 5, 0.5f, 0.2f)), 300) << temperature;
  }
}

TEST_P(SampleParityTest, SmallTemperaturesDoNotOverflow) {
  std::vector<float> logits(100, -3e38f);
  logits[60] = 3e38f;
  for (const float temperature : {1e-5f, 1e-4f, 1.0f}) {
    EXPECT_EQ(SampleOne(logits, Row(temperature)), 60);
    EXPECT_EQ(SampleOne(logits, Row(temperature, 3)), 60);
    EXPECT_EQ(SampleOne(logits, Row(temperature, 0, 0.9f)), 60);
  }
}

TEST_P(SampleParityTest, GreedyTakesTheLowestOfEqualIds) {
  std::vector<float> logits(257, 0.0f);
  EXPECT_EQ(SampleOne(logits, Row(0.0f)), 0);
  logits[256] = 1.0f;
  EXPECT_EQ(SampleOne(logits, Row(0.0f)), 256);
  logits[19] = 1.0f;
  EXPECT_EQ(SampleOne(logits, Row(0.0f)), 19);
}

TEST_P(SampleParityTest, BannedIdsAreNeverDrawn) {
  const std::vector<float> logits = RandomFloats(64, 1.0f, 5);
  SampleRow row = Row(1.0f);
  row.banned_begin = 1;
  row.banned_end = 4;
  const std::vector<int32_t> banned = {0, 10, 11, 63, 5};
  ExpectDistribution(logits, row, 3000, banned);
  row.temperature = 0.0f;
  std::vector<float> peaked = logits;
  peaked[10] = 9.0f;
  peaked[11] = 8.0f;
  peaked[40] = 7.0f;
  EXPECT_EQ(SampleOne(peaked, row, {.banned_ids = banned}), 40);
}

TEST_P(SampleParityTest, BanningEveryCandidateOfTopKLeavesTheNextBest) {
  std::vector<float> logits(30, 0.0f);
  for (size_t i = 0; i < 3; ++i) logits[i] = 10.0f;
  SampleRow row = Row(1.0f, 3);
  row.banned_end = 3;
  ExpectDistribution(logits, row, 500, {0, 1, 2});
}

TEST_P(SampleParityTest, BanningTheWholeVocabularyIsNoBan) {
  const std::vector<float> logits = {1.0f, 3.0f, 2.0f};
  const std::vector<int32_t> banned = {0, 1, 2, 1, -4, 99};
  SampleRow row = Row(0.0f);
  row.banned_end = 6;
  EXPECT_EQ(SampleOne(logits, row, {.banned_ids = banned}), 1);
  row.temperature = 1.0f;
  row.top_k = 1;
  EXPECT_EQ(SampleOne(logits, row, {.banned_ids = banned}), 1);
}

TEST_P(SampleParityTest, NonFiniteRowsAreReportedAndLeaveOthersAlone) {
  const int32_t vocab_size = 77;
  std::vector<SampleRow> rows;
  for (int i = 0; i < 5; ++i) rows.push_back(Row(1.0f));
  const std::vector<float> good = RandomFloats(5 * vocab_size, 1.0f, 8);
  const Draws clean = Sample(good, rows, vocab_size);
  for (const float value : {std::nanf(""), kInfinity, -kInfinity}) {
    for (const int64_t place : {0, 40, 76}) {
      std::vector<float> bad = good;
      bad[static_cast<size_t>(2 * vocab_size + place)] = value;
      const Draws draws = Sample(bad, rows, vocab_size);
      for (size_t row = 0; row < 5; ++row) {
        EXPECT_EQ(draws.non_finite[row], row == 2 ? 1 : 0);
        EXPECT_EQ(draws.token_ids[row], row == 2 ? 0 : clean.token_ids[row]);
      }
    }
  }
}

TEST_P(SampleParityTest, TheDrawDependsOnSeedAndPositionOnly) {
  const std::vector<float> logits = RandomFloats(500, 1.0f, 8);
  std::vector<SampleRow> rows;
  for (int i = 0; i < 40; ++i) {
    rows.push_back(Row(1.0f, i % 2 == 0 ? 0 : 50));
    rows.back().seed = static_cast<uint64_t>(i / 10);
    rows.back().output_position = i;
  }
  const Draws together = Sample(logits, rows, 500);
  int distinct_neighbours = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(SampleOne(logits, rows[i]), together.token_ids[i]);
    if (i > 0 && together.token_ids[i] != together.token_ids[i - 1]) ++distinct_neighbours;
  }
  EXPECT_GT(distinct_neighbours, 25);
}

// The same seed gives the same answer on every backend, but where a draw falls between two ids to
// within rounding.
TEST_P(SampleParityTest, DrawsAreThoseOfTheCpuBackend) {
  const int32_t vocab_size = 2000;
  const std::vector<float> logits = RandomFloats(vocab_size, 3.0f, 31);
  std::vector<SampleRow> rows;
  for (int i = 0; i < 600; ++i) {
    const SampleRow kinds[] = {Row(1.0f), Row(0.8f, 40), Row(1.1f, 0, 0.95f),
                               Row(1.3f, 200, 0.9f, 0.01f), Row(1.0f, 0, 1.0f, 0.02f)};
    rows.push_back(kinds[i % 5]);
    rows.back().output_position = i / 5;
  }
  const Draws here = Sample(logits, rows, vocab_size);
  BackendOptions options;
  options.kind = "cpu";
  auto cpu = CreateBackend(options);
  FQ_ASSERT_OK(cpu);
  std::vector<float> cpu_logits;
  for (size_t i = 0; i < rows.size(); ++i) {
    cpu_logits.insert(cpu_logits.end(), logits.begin(), logits.end());
  }
  std::vector<int32_t> cpu_tokens(rows.size());
  std::vector<uint8_t> non_finite(rows.size());
  SampleTokensParams params;
  params.num_rows = static_cast<int32_t>(rows.size());
  params.vocab_size = vocab_size;
  params.logits = cpu_logits.data();
  params.rows = rows.data();
  params.token_ids = cpu_tokens.data();
  params.non_finite = non_finite.data();
  FQ_ASSERT_OK((*cpu)->SampleTokens(params));
  int different = 0;
  for (size_t i = 0; i < rows.size(); ++i) different += here.token_ids[i] != cpu_tokens[i] ? 1 : 0;
  EXPECT_LE(different, 2);
}

TEST_P(SampleParityTest, LargeVocabularyWithTopPNearOne) {
  const std::vector<float> logits = RandomFloats(50000, 3.0f, 21);
  const std::vector<double> expected = ReferenceTokenProbabilities(logits, Row(1.0f, 0, 0.98f), {});
  std::vector<SampleRow> rows;
  for (int i = 0; i < 20; ++i) {
    rows.push_back(Row(1.0f, 0, 0.98f));
    rows.back().output_position = i;
  }
  for (const int32_t id : Sample(logits, rows, 50000).token_ids) {
    EXPECT_GT(expected[static_cast<size_t>(id)], 0.0);
  }
}

FQ_INSTANTIATE_PARITY(SampleParityTest);

}  // namespace
}  // namespace flashquant
