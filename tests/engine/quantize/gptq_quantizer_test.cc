// GPTQ with outliers against a straightforward double-precision GPTQ/SpQR written after the papers,
// on a layer with correlated inputs and planted heavy tails; and its own promises.
#include "engine/quantize/gptq_quantizer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>

#include "gtest/gtest.h"
#include "tests/engine/quantize/reference_gptq.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

// Squared error of the outputs, from the inputs themselves.
double OutputError(const SyntheticLayer& layer, const std::vector<double>& quantized) {
  double sum = 0;
  const int64_t rows = static_cast<int64_t>(layer.inputs.size()) / layer.k;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t n = 0; n < layer.n; ++n) {
      double output = 0;
      for (int64_t i = 0; i < layer.k; ++i) {
        const size_t at = static_cast<size_t>(n * layer.k + i);
        output += (static_cast<double>(layer.weights[at]) - quantized[at]) *
                  static_cast<double>(layer.inputs[static_cast<size_t>(row * layer.k + i)]);
      }
      sum += output * output;
    }
  }
  return sum;
}

double OutputError(const SyntheticLayer& layer, const QuantizedMatrix& matrix) {
  const std::vector<float> dense = Dequantize(matrix);
  return OutputError(layer, std::vector<double>(dense.begin(), dense.end()));
}

MatrixQuantizerOptions Options(int64_t group_size, double density) {
  MatrixQuantizerOptions options;
  options.group_size = group_size;
  options.density = density;
  return options;
}

QuantizedMatrix Quantize(const SyntheticLayer& layer, const MatrixQuantizerOptions& options) {
  const auto factor = FactorHessian(layer.hessian, {.group_size = options.group_size});
  EXPECT_THAT(factor, IsOk());
  return QuantizeMatrixGptq(layer.weights, layer.n, *factor, options);
}

TEST(GptqQuantizerTest, OutputErrorIsNoWorseThanThatOfTheReference) {
  const SyntheticLayer layer = MakeLayer(24, 256, 400, 1);
  const ReferenceGptq reference(layer, 0.01);
  for (const int64_t group_size : {int64_t{64}, int64_t{128}}) {
    const double gptq = OutputError(layer, reference.Run(static_cast<size_t>(group_size), 0));
    const double ours = OutputError(layer, Quantize(layer, Options(group_size, 0)));
    EXPECT_LE(ours, gptq) << group_size;
    // The same number of outliers: 4 of 128.
    const size_t outliers = static_cast<size_t>(group_size) / 32;
    const double spqr =
        OutputError(layer, reference.Run(static_cast<size_t>(group_size), outliers));
    const QuantizedMatrix with = Quantize(layer, Options(group_size, 1.0 / 32));
    EXPECT_LE(with.outliers.size(), layer.weights.size() / 32);
    EXPECT_LE(OutputError(layer, with), spqr) << group_size;
    EXPECT_LT(spqr, gptq);
  }
}

// The size of a small model's layer, group 128, the paper's 1 and 3% of outliers (four per 128 is
// 3.1%); tests/bench/synthetic_layer_bench.cc has 4096 x 4096.
TEST(GptqQuantizerTest, ALayerOf512InputsIsNoWorseThanTheReferenceAndFarBetterThanRounding) {
  const SyntheticLayer layer = MakeLayer(48, 512, 900, 7);
  const ReferenceGptq reference(layer, 0.01);
  const double energy = OutputError(layer, std::vector<double>(layer.weights.size(), 0.0));
  double before = HUGE_VAL;
  for (const size_t outliers : {size_t{0}, size_t{4}}) {
    const MatrixQuantizerOptions options = Options(128, static_cast<double>(outliers) / 128);
    const double rtn = OutputError(layer, QuantizeMatrix(layer.weights, layer.n, layer.k, options));
    const double ours = OutputError(layer, Quantize(layer, options));
    const double theirs = OutputError(layer, reference.Run(128, outliers));
    EXPECT_LE(ours, theirs);
    EXPECT_LT(ours, 0.25 * rtn);
    EXPECT_LT(ours, 0.5 * before);
    EXPECT_LT(std::sqrt(ours / energy), 0.06);
    RecordProperty("relative_output_error_ours_" + std::to_string(outliers),
                   std::to_string(std::sqrt(ours / energy)));
    before = ours;
  }
}

TEST(GptqQuantizerTest, OneGroupPerRowIsNoWorseThanTheReference) {
  const SyntheticLayer layer = MakeLayer(24, 256, 400, 5);
  const ReferenceGptq reference(layer, 0.01);
  const auto factor = FactorHessian(layer.hessian, {.group_size = layer.k});
  FQ_ASSERT_OK(factor);
  for (const size_t outliers : {size_t{0}, size_t{8}}) {
    const QuantizedMatrix ours = QuantizeMatrixGptq(
        layer.weights, layer.n, *factor, Options(-1, static_cast<double>(outliers) / 256));
    EXPECT_EQ(ours.outliers.size(), outliers * 24);
    EXPECT_LE(OutputError(layer, ours), OutputError(layer, reference.Run(256, outliers)))
        << outliers;
  }
}

TEST(GptqQuantizerTest, BeatsRoundToNearestByFar) {
  const SyntheticLayer layer = MakeLayer(40, 384, 500, 2);
  for (const double density : {0.0, 0.02}) {
    const MatrixQuantizerOptions options = Options(128, density);
    const double rtn = OutputError(layer, QuantizeMatrix(layer.weights, layer.n, layer.k, options));
    EXPECT_LT(OutputError(layer, Quantize(layer, options)), 0.6 * rtn);
  }
}

TEST(GptqQuantizerTest, ReportsItsErrorsAndUsesTheWholeBudgetWithoutEmptySlots) {
  // 200 columns: the last group is short, and so is the last tile.
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{40, 200}, {33, 600}, {1, 128}}) {
    const SyntheticLayer layer = MakeLayer(n, k, 300, 3);
    for (const bool symmetric : {false, true}) {
      MatrixQuantizerOptions options = Options(64, 0.03);
      options.symmetric = symmetric;
      const QuantizedMatrix result = Quantize(layer, options);
      FQ_EXPECT_OK(ValidateInt4Weight(result.weight));
      EXPECT_EQ(result.weight.zeros.empty(), symmetric);
      const std::vector<float> dense = Dequantize(result);
      double error = 0;
      double energy = 0;
      for (size_t i = 0; i < dense.size(); ++i) {
        const double difference = static_cast<double>(layer.weights[i] - dense[i]);
        error += difference * difference;
        energy += static_cast<double>(layer.weights[i]) * static_cast<double>(layer.weights[i]);
      }
      EXPECT_NEAR(result.error_with, error, 1e-4 * error);
      EXPECT_NEAR(result.energy, energy, 1e-6 * energy);
      EXPECT_NEAR(result.output_error, OutputError(layer, result), 1e-3 * result.output_error);
      EXPECT_NEAR(result.output_energy, OutputError(layer, std::vector<double>(dense.size(), 0.0)),
                  1e-3 * result.output_energy);
      EXPECT_EQ(static_cast<int64_t>(result.outliers.size()), RecordBudget(n, k, options) * 4);
      std::map<std::pair<int64_t, int64_t>, int> per_tile_column;
      for (const TileCooSlot& slot : result.outliers) {
        ++per_tile_column[{slot.k / 256, slot.n}];
        EXPECT_EQ(result.weight.Code(slot.n, slot.k), result.weight.ZeroPoint(slot.n, slot.k / 64));
      }
      for (const auto& [place, count] : per_tile_column) EXPECT_EQ(count % 4, 0);
    }
  }
}

TEST(GptqQuantizerTest, MoreOutliersAndMoreDescentNeverCostOutputError) {
  const SyntheticLayer layer = MakeLayer(32, 256, 300, 4);
  double before = HUGE_VAL;
  for (const double density : {0.0, 0.01, 0.03, 0.1}) {
    const double error = Quantize(layer, Options(128, density)).output_error;
    EXPECT_LT(error, before) << density;
    before = error;
  }
  before = HUGE_VAL;
  for (const int sweeps : {0, 1, 2, 5}) {
    MatrixQuantizerOptions options = Options(128, 0.01);
    options.descent_sweeps = sweeps;
    const double error = Quantize(layer, options).output_error;
    EXPECT_LT(error, before) << sweeps;
    before = error;
  }
}

TEST(GptqQuantizerTest, NumberOfThreadsDoesNotChangeAByte) {
  const SyntheticLayer layer = MakeLayer(100, 256, 300, 5);
  MatrixQuantizerOptions options = Options(32, 0.03);
  const QuantizedMatrix one = Quantize(layer, options);
  options.num_threads = 6;
  const auto factor = FactorHessian(layer.hessian, {.group_size = 32, .num_threads = 6});
  FQ_ASSERT_OK(factor);
  const QuantizedMatrix many = QuantizeMatrixGptq(layer.weights, layer.n, *factor, options);
  EXPECT_EQ(one.weight.qweight, many.weight.qweight);
  EXPECT_EQ(one.weight.scales, many.weight.scales);
  EXPECT_EQ(one.weight.zeros, many.weight.zeros);
  EXPECT_EQ(Dequantize(one), Dequantize(many));
  EXPECT_EQ(one.output_error, many.output_error);
}

TEST(GptqQuantizerTest, WeightsOfDeadInputsAreStillRoundedToNearest) {
  SyntheticLayer layer = MakeLayer(16, 128, 200, 6);
  for (size_t i = 0; i < layer.inputs.size(); ++i) {
    if (i % 128 == 9 || i % 128 == 77) layer.inputs[i] = 0;
  }
  layer.hessian = Hessian(128);
  layer.hessian.Add(layer.inputs, 1);
  const QuantizedMatrix result = Quantize(layer, Options(64, 0));
  const std::vector<float> dense = Dequantize(result);
  for (int64_t n = 0; n < 16; ++n) {
    for (const int64_t k : {9, 77}) {
      const GroupParams params{result.weight.scales[static_cast<size_t>(n * 2 + k / 64)],
                               result.weight.zeros[static_cast<size_t>(n * 2 + k / 64)]};
      const float weight = layer.weights[static_cast<size_t>(n * 128 + k)];
      EXPECT_EQ(result.weight.Code(n, k), EncodeInt4(weight, params)) << n << " " << k;
    }
  }
}

TEST(GptqQuantizerTest, SingularAndEmptyHessiansGiveAResultLikeRoundToNearest) {
  SyntheticLayer layer = MakeLayer(16, 128, 200, 7);
  const double rtn = QuantizeMatrix(layer.weights, layer.n, layer.k, Options(64, 0.02)).error_with;
  layer.hessian = Hessian(128);
  const QuantizedMatrix none = Quantize(layer, Options(64, 0.02));
  EXPECT_LE(none.error_with, 1.1 * rtn);
  // Two different inputs in all.
  layer.hessian.Add(std::span<const float>(layer.inputs).subspan(0, 256), 1);
  const QuantizedMatrix singular = Quantize(layer, Options(64, 0.02));
  FQ_EXPECT_OK(ValidateInt4Weight(singular.weight));
  EXPECT_LE(singular.error_with, 10 * rtn);
  EXPECT_LT(singular.output_error, 1e-3 * singular.output_energy);
}

TEST(GptqQuantizerTest, WeightsAndInputsAtTheEdgeOfTheirRangeGiveAValidMatrix) {
  SyntheticLayer layer = MakeLayer(8, 128, 100, 9);
  for (size_t i = 0; i < layer.weights.size(); i += 17) layer.weights[i] *= 1e16f;
  for (size_t i = 0; i < layer.inputs.size(); ++i) layer.inputs[i] *= i % 128 == 50 ? 1e12f : 1e-9f;
  layer.hessian = Hessian(128);
  layer.hessian.Add(layer.inputs, 1);
  const QuantizedMatrix result = Quantize(layer, Options(64, 0.02));
  FQ_EXPECT_OK(ValidateInt4Weight(result.weight));
  EXPECT_GT(result.outliers.size(), 0u);
  for (const TileCooSlot& slot : result.outliers) {
    EXPECT_TRUE(std::isfinite(ToFloat(BFloat16{slot.value_bits}))) << slot.n << ", " << slot.k;
  }
}

// A cost that overflows is a great cost, not "cannot be": the budget is spent all the same.
TEST(GptqQuantizerTest, ErrorsBeyondFloatStillSpendTheWholeBudget) {
  SyntheticLayer layer = MakeLayer(8, 256, 100, 10);
  for (float& weight : layer.weights) weight *= 1e12f;
  for (float& input : layer.inputs) input *= 1e12f;
  layer.hessian = Hessian(256);
  layer.hessian.Add(layer.inputs, 1);
  const QuantizedMatrix result = Quantize(layer, Options(64, 0.02));
  FQ_EXPECT_OK(ValidateInt4Weight(result.weight));
  EXPECT_EQ(static_cast<int64_t>(result.outliers.size()),
            4 * RecordBudget(8, 256, Options(64, 0.02)));
}

TEST(GptqQuantizerTest, AHigherThresholdKeepsFewerOutliers) {
  const SyntheticLayer layer = MakeLayer(48, 256, 300, 8);
  const auto factor = FactorHessian(layer.hessian, {.group_size = 128});
  FQ_ASSERT_OK(factor);
  const double spread = std::inner_product(factor->cost.begin(), factor->cost.end(),
                                           std::vector<double>(256, 0.02 * 0.02).begin(), 0.0) /
                        256;
  size_t before = layer.weights.size();
  for (const double threshold : {0.02, 0.05, 0.2, 1.0}) {
    MatrixQuantizerOptions options = Options(128, 0);
    options.least_benefit = threshold * spread;
    const QuantizedMatrix result = Quantize(layer, options);
    EXPECT_LT(result.outliers.size(), before) << threshold;
    EXPECT_EQ(result.outliers.size() % 4, 0u);
    before = result.outliers.size();
  }
  EXPECT_GT(before, 0u);
}

}  // namespace
}  // namespace flashquant
