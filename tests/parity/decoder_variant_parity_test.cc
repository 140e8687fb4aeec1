// The ops of decoders that are not Llama's: LayerNorm, norms of single heads, learned positions,
// ReLU. Oracles are double loops written here.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/parity/parity_fixture.h"
#include "tests/support/random_weights.h"
#include "tests/support/reference_ops.h"
#include "tests/support/tensor_matchers.h"

namespace flashquant {
namespace {

class DecoderVariantParityTest : public ParityTest {};

TEST_P(DecoderVariantParityTest, LayerNormWithAndWithoutResidual) {
  for (const int32_t hidden : {1, 7, 64, 576, 2049}) {
    for (const bool with_residual : {false, true}) {
      constexpr int32_t kRows = 5;
      std::vector<float> x = RandomFloats(kRows * hidden, 2.0f, 1);
      for (float& value : x) value += 3.0f;  // a mean that must go
      x = RoundToAct(x);
      const std::vector<float> weight = RandomFloats(hidden, 1.0f, 2);
      const std::vector<float> bias = RandomFloats(hidden, 1.0f, 3);
      const std::vector<float> residual = RoundToAct(RandomFloats(kRows * hidden, 2.0f, 4));
      std::vector<double> expected;
      std::vector<double> tolerance;
      for (int32_t row = 0; row < kRows; ++row) {
        std::vector<double> source;
        double mean = 0;
        for (int32_t i = 0; i < hidden; ++i) {
          const auto at = static_cast<size_t>(row * hidden + i);
          source.push_back(static_cast<double>(x[at]) +
                           (with_residual ? static_cast<double>(residual[at]) : 0.0));
          mean += source.back() / hidden;
        }
        double variance = 0;
        for (const double value : source) variance += (value - mean) * (value - mean) / hidden;
        for (int32_t i = 0; i < hidden; ++i) {
          const auto at = static_cast<size_t>(i);
          const double normal = (source[at] - mean) / std::sqrt(variance + 1e-5);
          expected.push_back(normal * static_cast<double>(weight[at]) +
                             static_cast<double>(bias[at]));
          // The sum's own rounding to the activation type is one of a value of up to 10, which the
          // division by the deviation then stretches.
          const double sum_rounding = with_residual ? ActRounding(10.0) : 0.0;
          tolerance.push_back(1e-5 * (1 + std::fabs(normal)) + 2 * ActRounding(expected.back()) +
                              2 * sum_rounding / std::sqrt(variance + 1e-5));
        }
      }
      const DeviceBuffer x_device = UploadActs(x);
      const DeviceBuffer weight_device = Upload(weight);
      const DeviceBuffer bias_device = Upload(bias);
      const DeviceBuffer residual_device = UploadActs(residual);
      FQ_ASSERT_OK(
          backend().LayerNorm({.num_rows = kRows,
                               .hidden = hidden,
                               .epsilon = 1e-5f,
                               .x = x_device.data(),
                               .residual = with_residual ? residual_device.data() : nullptr,
                               .weight = weight_device.data(),
                               .bias = bias_device.data(),
                               .out = x_device.data()}));  // in place is allowed
      if (hidden > 1 || !with_residual) {
        EXPECT_TRUE(AllWithin(DownloadActs(x_device), expected, tolerance)) << hidden;
      }
      if (!with_residual) continue;
      const std::vector<float> sums = DownloadActs(residual_device);
      for (size_t i = 0; i < sums.size(); ++i) {
        const double sum = static_cast<double>(x[i]) + static_cast<double>(residual[i]);
        EXPECT_NEAR(static_cast<double>(sums[i]), sum, 1e-6 * std::fabs(sum) + ActRounding(sum));
      }
    }
  }
}

TEST_P(DecoderVariantParityTest, HeadNormTouchesQueriesAndKeysHeadByHead) {
  for (const int32_t head_dim : {2, 16, 48, 64, 128}) {
    constexpr int32_t kTokens = 3;
    constexpr int32_t kHeads = 6;
    constexpr int32_t kKvHeads = 2;
    const int32_t width = (kHeads + 2 * kKvHeads) * head_dim;
    const std::vector<float> qkv = RoundToAct(RandomFloats(kTokens * width, 2.0f, 5));
    const std::vector<float> q_weight = RandomFloats(head_dim, 1.0f, 6);
    const std::vector<float> k_weight = RandomFloats(head_dim, 1.0f, 7);
    std::vector<double> expected(qkv.begin(), qkv.end());
    std::vector<double> tolerance(qkv.size(), 0.0);
    for (int32_t token = 0; token < kTokens; ++token) {
      for (int32_t head = 0; head < kHeads + kKvHeads; ++head) {
        const auto begin = static_cast<size_t>(token * width + head * head_dim);
        const std::vector<float>& weight = head < kHeads ? q_weight : k_weight;
        double squares = 0;
        for (size_t i = 0; i < weight.size(); ++i) {
          squares += expected[begin + i] * expected[begin + i] / head_dim;
        }
        for (size_t i = 0; i < weight.size(); ++i) {
          double& value = expected[begin + i];
          value *= static_cast<double>(weight[i]) / std::sqrt(squares + 1e-6);
          tolerance[begin + i] = 2e-6 * std::fabs(value) + 1.5 * ActRounding(value);
        }
      }
    }
    const DeviceBuffer device = UploadActs(qkv);
    const DeviceBuffer q_device = Upload(q_weight);
    const DeviceBuffer k_device = Upload(k_weight);
    FQ_ASSERT_OK(backend().HeadNorm({.num_tokens = kTokens,
                                     .num_heads = kHeads,
                                     .num_kv_heads = kKvHeads,
                                     .head_dim = head_dim,
                                     .epsilon = 1e-6f,
                                     .qkv = device.data(),
                                     .q_weight = q_device.data(),
                                     .k_weight = k_device.data()}));
    EXPECT_TRUE(AllWithin(DownloadActs(device), expected, tolerance)) << head_dim;
  }
}

TEST_P(DecoderVariantParityTest, PositionsAreAddedByRow) {
  for (const int32_t hidden : {1, 33, 512}) {
    const std::vector<int32_t> positions = {4, 0, 9, 4};
    const std::vector<float> x = RoundToAct(RandomFloats(4 * hidden, 1.0f, 8));
    const std::vector<float> table = RandomFloats(10 * hidden, 1.0f, 9);
    const DeviceBuffer x_device = UploadActs(x);
    const DeviceBuffer position_device = Upload(positions);
    const DeviceBuffer table_device = Upload(table);
    FQ_ASSERT_OK(backend().AddPositions({.num_tokens = 4,
                                         .hidden = hidden,
                                         .positions = position_device.As<int32_t>(),
                                         .table = table_device.As<float>(),
                                         .x = x_device.data()}));
    const std::vector<float> out = DownloadActs(x_device);
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t row = i / static_cast<size_t>(hidden);
      const size_t at =
          static_cast<size_t>(positions[row] * hidden) + i % static_cast<size_t>(hidden);
      EXPECT_EQ(out[i], RoundToAct(x[i] + table[at])) << i;
    }
  }
}

TEST_P(DecoderVariantParityTest, ReluKeepsPositiveValuesAndNan) {
  std::vector<float> x = RoundToAct(RandomFloats(20'000, 1.0f, 10));
  x[3] = std::numeric_limits<float>::quiet_NaN();
  const DeviceBuffer device = UploadActs(x);
  FQ_ASSERT_OK(backend().Relu({.count = static_cast<int64_t>(x.size()), .x = device.data()}));
  const std::vector<float> out = DownloadActs(device);
  for (size_t i = 0; i < out.size(); ++i) {
    if (i == 3) {
      EXPECT_TRUE(std::isnan(out[i]));
    } else {
      EXPECT_EQ(out[i], x[i] > 0 ? x[i] : 0.0f);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, DecoderVariantParityTest, testing::ValuesIn(ParityTargets()),
                         ParityTargetName);

}  // namespace
}  // namespace flashquant
