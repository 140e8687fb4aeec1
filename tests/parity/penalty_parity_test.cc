// Penalties, biases and logprobs of the sampling op against a double-precision reference written
// from their definitions, which counts tokens in the history itself (reliability rows R25, T12).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "tests/parity/sampling_fixture.h"
#include "tests/support/random_weights.h"
#include "tests/support/reference_ops.h"

namespace flashquant {
namespace {

using PenaltyParityTest = SamplingParityTest;
using LogprobParityTest = SamplingParityTest;

// The lists that the engine would make of the history, and the row's ranges of them.
SamplingLists ListsOf(const ReferenceHistory& history, SampleRow* row) {
  std::map<int32_t, int32_t> counts;
  for (const int32_t id : history.prompt) counts[id];
  for (const int32_t id : history.answer) ++counts[id];
  SamplingLists lists;
  // Something before the row's own ranges, which must not be looked at.
  lists.token_counts.push_back({0, 1000});
  lists.biases.push_back({0, -1000.0f});
  for (const auto& [id, count] : counts) lists.token_counts.push_back({id, count});
  lists.biases.insert(lists.biases.end(), history.biases.begin(), history.biases.end());
  row->counts_begin = row->biases_begin = 1;
  row->counts_end = static_cast<int32_t>(lists.token_counts.size());
  row->biases_end = static_cast<int32_t>(lists.biases.size());
  return lists;
}

SampleRow PenaltyRow(float temperature, float repetition, float presence, float frequency) {
  SampleRow row = Row(temperature);
  row.repetition_penalty = repetition;
  row.presence_penalty = presence;
  row.frequency_penalty = frequency;
  return row;
}

const ReferenceHistory kHistory = {.prompt = {3, 9, 3, 20, 5},
                                   .answer = {5, 7, 7, 7, 20, 41},
                                   .biases = {{2, 1.5f}, {7, 1.0f}, {30, -2.0f}}};

TEST_P(PenaltyParityTest, DrawsFollowTheOracle) {
  const std::vector<float> logits = RandomFloats(48, 2.0f, 12);
  for (SampleRow row : {PenaltyRow(1.0f, 1.5f, 0.0f, 0.0f), PenaltyRow(1.0f, 0.5f, 0.0f, 0.0f),
                        PenaltyRow(1.0f, 1.0f, 1.2f, 0.0f), PenaltyRow(1.0f, 1.0f, 0.0f, 0.7f),
                        PenaltyRow(0.8f, 1.3f, 0.4f, 0.3f), PenaltyRow(1.2f, 1.0f, -2.0f, -0.5f)}) {
    for (const int32_t top_k : {0, 10}) {
      row.top_k = top_k;
      const SamplingLists lists = ListsOf(kHistory, &row);
      ExpectDistribution(
          logits, row, 3000, lists,
          ReferenceTokenProbabilities(ReferencePenalisedLogits(logits, row, kHistory), row, {}));
    }
  }
}

TEST_P(PenaltyParityTest, TheTestRefusesOccurrencesCountedOnce) {
  const std::vector<float> logits = RandomFloats(48, 2.0f, 12);
  SampleRow row = PenaltyRow(1.0f, 1.0f, 0.0f, 1.0f);
  const std::vector<double> right =
      ReferenceTokenProbabilities(ReferencePenalisedLogits(logits, row, kHistory), row, {});
  ReferenceHistory once = kHistory;
  once.answer = {5, 7, 20, 41};
  const std::vector<double> wrong =
      ReferenceTokenProbabilities(ReferencePenalisedLogits(logits, row, once), row, {});
  EXPECT_GT(std::abs(right[7] - wrong[7]) / right[7], 0.5);
}

TEST_P(PenaltyParityTest, GreedyTakesTheBestAfterPenaltiesAndBiases) {
  std::mt19937 random(3);
  int changed = 0;
  for (uint64_t trial = 0; trial < 60; ++trial) {
    const auto vocab_size = static_cast<int64_t>(1 + random() % 3000);
    const std::vector<float> logits = RandomFloats(vocab_size, 3.0f, trial + 1);
    ReferenceHistory history;
    const auto id = [&] {
      return static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_size));
    };
    for (int i = 0; i < 200; ++i) history.prompt.push_back(id());
    for (int i = 0; i < 300; ++i) history.answer.push_back(id());
    history.answer.push_back(
        static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin()));
    history.biases = {{id(), 4.0f}};
    SampleRow row = PenaltyRow(0.0f, 1.7f, 0.5f, 0.25f);
    const SamplingLists lists = ListsOf(history, &row);
    const std::vector<double> expected = ReferencePenalisedLogits(logits, row, history);
    const int32_t drawn = SampleOne(logits, row, lists);
    // Equal but for rounding.
    EXPECT_NEAR(expected[static_cast<size_t>(drawn)], *std::ranges::max_element(expected), 1e-5);
    changed += drawn == history.answer.back() ? 0 : 1;
  }
  EXPECT_GT(changed, 30);
}

TEST_P(PenaltyParityTest, ExtremePenaltiesStayFinite) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  std::vector<float> logits(40, -kLargest);
  for (size_t id = 0; id < 20; ++id) logits[id] = kLargest;
  ReferenceHistory history;
  for (int32_t id = 0; id < 40; ++id) history.answer.push_back(id);
  history.biases = {{0, -100.0f}, {39, -100.0f}, {1, 100.0f}};
  for (const float repetition : {std::numeric_limits<float>::min(), 2.0f}) {
    for (const float penalty : {-2.0f, 2.0f}) {
      for (const float temperature : {0.0f, 1e-5f, 1.0f, 2.0f}) {
        SampleRow row = PenaltyRow(temperature, repetition, penalty, penalty);
        row.top_logprobs = 3;
        const SamplingLists lists = ListsOf(history, &row);
        const Draws draws = Sample(logits, {row}, 40, lists);
        EXPECT_EQ(draws.non_finite[0], 0);
        EXPECT_GE(draws.token_ids[0], 0);
        EXPECT_LT(draws.token_ids[0], 20);
        for (int i = 0; i < 4; ++i)
          EXPECT_TRUE(std::isfinite(draws.logprobs[static_cast<size_t>(i)].logprob));
      }
    }
  }
}

TEST_P(PenaltyParityTest, BiasesComeBeforeBansAndAfterPenalties) {
  std::vector<float> logits(10, 0.0f);
  logits[4] = 8.0f;
  SampleRow row = PenaltyRow(0.0f, 2.0f, 0.0f, 0.0f);
  ReferenceHistory history = {.prompt = {4}, .answer = {}, .biases = {{6, 5.0f}}};
  SamplingLists lists = ListsOf(history, &row);
  EXPECT_EQ(SampleOne(logits, row, lists), 6);  // 8 / 2 against 5
  history.biases.push_back({4, 2.0f});
  lists = ListsOf(history, &row);
  EXPECT_EQ(SampleOne(logits, row, lists), 4);  // 8 / 2 + 2, not (8 + 2) / 2
  history.biases[1].bias = 100.0f;
  lists = ListsOf(history, &row);
  lists.banned_ids = {4};
  row.banned_end = 1;
  EXPECT_EQ(SampleOne(logits, row, lists), 6);
}

TEST_P(PenaltyParityTest, BiasAgainstEveryCandidateOfTopKLeavesSomethingToDraw) {  // R25
  std::vector<float> logits(64, 0.0f);
  for (size_t id = 0; id < 5; ++id) logits[id] = 12.0f;
  SampleRow row = Row(1.0f, 5);
  ReferenceHistory history;
  for (int32_t id = 0; id < 64; ++id) history.biases.push_back({id, -100.0f});
  SamplingLists lists = ListsOf(history, &row);
  ExpectDistribution(logits, row, 2000, lists, ReferenceTokenProbabilities(logits, row, {}));
  history.biases.resize(5);
  lists = ListsOf(history, &row);
  const int32_t drawn = SampleOne(logits, row, lists);
  EXPECT_GE(drawn, 5);
  EXPECT_LT(drawn, 64);
}

TEST_P(PenaltyParityTest, IdsOutsideTheVocabularyAreLeftAlone) {
  const std::vector<float> logits = {1.0f, 3.0f, 2.0f};
  SampleRow row = PenaltyRow(0.0f, 1.0f, 0.5f, 0.0f);
  row.counts_end = row.biases_end = 3;
  const SamplingLists lists = {.token_counts = {{-1, 1}, {3, 1}, {1000000, 1}},
                               .biases = {{-1, 1.0f}, {3, 9.0f}, {1000000, 9.0f}}};
  EXPECT_EQ(SampleOne(logits, row, lists), 1);
}

// What rounding may do: the weights and their sum in single precision, and the result's own.
double LogprobTolerance(double logprob) { return 3e-6 + 2e-7 * std::abs(logprob); }

void ExpectLogprobs(const std::vector<float>& logits, int32_t token, int32_t num_top,
                    const TokenLogprob* got) {
  const std::vector<double> expected = ReferenceLogprobs(logits);
  const auto check = [&](const TokenLogprob& logprob) {
    const double want = expected.at(static_cast<size_t>(logprob.token_id));
    EXPECT_NEAR(logprob.logprob, want, LogprobTolerance(want)) << logprob.token_id;
  };
  EXPECT_EQ(got[0].token_id, token);
  check(got[0]);
  std::vector<int32_t> order(logits.size());
  for (size_t id = 0; id < logits.size(); ++id) order[id] = static_cast<int32_t>(id);
  std::ranges::stable_sort(order, [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  for (int32_t i = 0; i < num_top; ++i) {
    const TokenLogprob& top = got[1 + i];
    if (static_cast<size_t>(i) < order.size()) {
      EXPECT_EQ(top.token_id, order[static_cast<size_t>(i)]) << "place " << i;
      check(top);
    } else {
      EXPECT_EQ(top.token_id, -1);
    }
  }
}

TEST_P(LogprobParityTest, AreThoseOfTheLogitsAsTheyCame) {
  for (const int64_t vocab_size : {1, 7, 33, 1000, 1025, 50000}) {
    const std::vector<float> logits = RandomFloats(vocab_size, 4.0f, 5);
    std::vector<SampleRow> rows = {Row(0.0f), Row(1.0f), Row(0.3f, 3), Row(2.0f, 0, 0.5f),
                                   PenaltyRow(0.7f, 1.5f, 1.0f, 1.0f)};
    ReferenceHistory history = {.prompt = {0}, .answer = {0, 0}, .biases = {{0, 50.0f}}};
    const SamplingLists lists = ListsOf(history, &rows[4]);
    rows[4].banned_begin = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].top_logprobs = std::vector<int32_t>{20, 0, 1, 5, 20}[i];
    }
    const Draws draws = Sample(logits, rows, static_cast<int32_t>(vocab_size), lists);
    for (size_t i = 0; i < rows.size(); ++i) {
      ExpectLogprobs(logits, draws.token_ids[i], rows[i].top_logprobs,
                     &draws.logprobs[i * kLogprobsPerRow]);
    }
  }
}

TEST_P(LogprobParityTest, EqualLogitsAreInTheOrderOfTheirIds) {
  std::vector<float> logits(300, 1.0f);
  logits[200] = 2.0f;
  logits[100] = -0.0f;
  logits[101] = 0.0f;
  SampleRow row = Row(0.0f);
  row.top_logprobs = 20;
  const Draws draws = Sample(logits, {row}, 300);
  ExpectLogprobs(logits, 200, 20, draws.logprobs.data());
  const std::vector<float> flat(300, -7.5f);
  const Draws flat_draws = Sample(flat, {row}, 300);
  ExpectLogprobs(flat, 0, 20, flat_draws.logprobs.data());
}

TEST_P(LogprobParityTest, TheToleranceRefusesAnotherTemperature) {
  const std::vector<float> logits = RandomFloats(100, 4.0f, 5);
  std::vector<float> warmer = logits;
  for (float& logit : warmer) logit /= 1.001f;
  const double right = ReferenceLogprobs(logits)[3];
  EXPECT_GT(std::abs(right - ReferenceLogprobs(warmer)[3]), LogprobTolerance(right));
}

TEST_P(LogprobParityTest, AskingForThemChangesNoDrawAndTouchesNoOtherRow) {
  const int32_t vocab_size = 777;
  const std::vector<float> logits = RandomFloats(int64_t{8} * vocab_size, 3.0f, 9);
  std::vector<SampleRow> rows;
  for (int i = 0; i < 8; ++i) {
    rows.push_back(Row(i % 3 == 0 ? 0.0f : 0.9f, i % 2 == 0 ? 0 : 30));
    rows.back().output_position = i;
  }
  const Draws plain = Sample(logits, rows, vocab_size);
  for (size_t i = 0; i < 8; i += 2) rows[i].top_logprobs = 4;
  const Draws asked = Sample(logits, rows, vocab_size);
  EXPECT_EQ(asked.token_ids, plain.token_ids);
  for (size_t i = 1; i < 8; i += 2) {
    EXPECT_EQ(asked.logprobs[i * kLogprobsPerRow].token_id, -9) << "row " << i << " did not ask";
  }
}

TEST_P(LogprobParityTest, RowsBesideANonFiniteOneKeepTheirBits) {  // T12
  const int32_t vocab_size = 500;
  const std::vector<float> good = RandomFloats(int64_t{3} * vocab_size, 2.0f, 4);
  std::vector<SampleRow> rows(3, PenaltyRow(0.9f, 1.3f, 0.0f, 0.0f));
  SamplingLists lists;
  for (SampleRow& row : rows) {
    lists = ListsOf(kHistory, &row);
    row.top_logprobs = 6;
  }
  const Draws clean = Sample(good, rows, vocab_size, lists);
  std::vector<float> bad = good;
  for (const float value : {std::nanf(""), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()}) {
    std::fill(bad.begin() + vocab_size, bad.begin() + 2 * vocab_size, value);
    const Draws draws = Sample(bad, rows, vocab_size, lists);
    EXPECT_EQ(draws.non_finite, (std::vector<uint8_t>{0, 1, 0}));
    for (const size_t row : {size_t{0}, size_t{2}}) {
      EXPECT_EQ(draws.token_ids[row], clean.token_ids[row]);
      for (size_t i = row * kLogprobsPerRow; i < row * kLogprobsPerRow + 7; ++i) {
        EXPECT_EQ(draws.logprobs[i].token_id, clean.logprobs[i].token_id);
        EXPECT_EQ(draws.logprobs[i].logprob, clean.logprobs[i].logprob);
      }
    }
  }
}

FQ_INSTANTIATE_PARITY(PenaltyParityTest);
FQ_INSTANTIATE_PARITY(LogprobParityTest);

}  // namespace
}  // namespace flashquant
