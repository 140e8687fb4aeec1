// SamplingParityTest: runs the sampling op on a backend and holds many draws against the oracle's
// probabilities.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "tests/parity/parity_fixture.h"
#include "tests/support/reference_ops.h"

namespace flashquant {

struct Draws {
  std::vector<int32_t> token_ids;
  std::vector<uint8_t> non_finite;
  std::vector<TokenLogprob> logprobs;  // [rows, kLogprobsPerRow]
};

// What the rows' ranges refer to.
struct SamplingLists {
  std::vector<int32_t> banned_ids = {};
  std::vector<TokenCount> token_counts = {};
  std::vector<TokenBias> biases = {};
};

inline SampleRow Row(float temperature, int32_t top_k = 0, float top_p = 1.0f, float min_p = 0.0f) {
  SampleRow row;
  row.temperature = temperature;
  row.top_k = top_k;
  row.top_p = top_p;
  row.min_p = min_p;
  row.seed = 42;
  return row;
}

class SamplingParityTest : public ParityTest {
 protected:
  // `logits` is one row, repeated for each of `rows`, or all rows' logits.
  Draws Sample(std::vector<float> logits, const std::vector<SampleRow>& rows, int32_t vocab_size,
               const SamplingLists& lists = {}) {
    const std::vector<float> one_row = logits;
    const size_t size = rows.size() * static_cast<size_t>(vocab_size);
    while (logits.size() < size) logits.insert(logits.end(), one_row.begin(), one_row.end());
    const DeviceBuffer logits_device = Upload(logits);
    const DeviceBuffer scratch = UploadFloatZeros(static_cast<int64_t>(size));
    const DeviceBuffer rows_device = Upload(rows);
    const DeviceBuffer banned = Upload(lists.banned_ids);
    const DeviceBuffer counts = Upload(lists.token_counts);
    const DeviceBuffer biases = Upload(lists.biases);
    const DeviceBuffer tokens = Upload(std::vector<int32_t>(rows.size(), -1));
    const DeviceBuffer non_finite = Upload(std::vector<uint8_t>(rows.size(), 9));
    const DeviceBuffer logprobs =
        Upload(std::vector<TokenLogprob>(rows.size() * kLogprobsPerRow, {-9, 9.0f}));
    EXPECT_TRUE(backend()
                    .SampleTokens({.num_rows = static_cast<int32_t>(rows.size()),
                                   .vocab_size = vocab_size,
                                   .logits = logits_device.As<float>(),
                                   .rows = rows_device.As<SampleRow>(),
                                   .banned_ids = banned.As<int32_t>(),
                                   .token_counts = counts.As<TokenCount>(),
                                   .biases = biases.As<TokenBias>(),
                                   .token_ids = tokens.As<int32_t>(),
                                   .non_finite = non_finite.As<uint8_t>(),
                                   .scratch = scratch.As<float>(),
                                   .logprobs = logprobs.As<TokenLogprob>()})
                    .ok());
    return {Download<int32_t>(tokens), Download<uint8_t>(non_finite),
            Download<TokenLogprob>(logprobs)};
  }

  int32_t SampleOne(const std::vector<float>& logits, const SampleRow& row,
                    const SamplingLists& lists = {}) {
    return Sample(logits, {row}, static_cast<int32_t>(logits.size()), lists).token_ids[0];
  }

  // Draws `count` tokens at output positions 0.. and compares their numbers with `expected`
  // probabilities: no token of probability 0, and chi-square below its mean + 4 deviations.
  void ExpectDistribution(const std::vector<float>& logits, SampleRow row, int count,
                          const SamplingLists& lists, const std::vector<double>& expected) {
    std::vector<SampleRow> rows;
    for (int i = 0; i < count; ++i) {
      row.output_position = i;
      rows.push_back(row);
    }
    const Draws draws = Sample(logits, rows, static_cast<int32_t>(logits.size()), lists);
    std::map<int32_t, int> counts;
    for (const int32_t id : draws.token_ids) ++counts[id];
    double chi_square = 0.0;
    int classes = 0;
    double rare = 0.0;  // ids that are expected less than 5 times make one class
    int rare_count = 0;
    for (int32_t id = 0; id < static_cast<int32_t>(logits.size()); ++id) {
      const double mean = expected[static_cast<size_t>(id)] * count;
      const int seen = counts.contains(id) ? counts[id] : 0;
      if (mean == 0.0) {
        EXPECT_EQ(seen, 0) << "token " << id << " was filtered out";
      } else if (mean < 5.0) {
        rare += mean;
        rare_count += seen;
      } else {
        chi_square += (seen - mean) * (seen - mean) / mean;
        ++classes;
      }
    }
    if (rare > 1.0) {
      chi_square += (rare_count - rare) * (rare_count - rare) / rare;
      ++classes;
    }
    EXPECT_LT(chi_square, classes + 4.0 * std::sqrt(2.0 * classes)) << classes << " classes";
  }
  // By the oracle for a row without history.
  void ExpectDistribution(const std::vector<float>& logits, const SampleRow& row, int count,
                          const std::vector<int32_t>& banned_ids = {}) {
    ExpectDistribution(logits, row, count, {.banned_ids = banned_ids},
                       ReferenceTokenProbabilities(logits, row, banned_ids));
  }
};

}  // namespace flashquant
