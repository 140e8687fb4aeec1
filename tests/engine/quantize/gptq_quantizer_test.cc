// GPTQ with outliers against a straightforward double-precision GPTQ/SpQR written after the papers,
// on a layer with correlated inputs and planted heavy tails; and its own promises.
#include "engine/quantize/gptq_quantizer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

struct Layer {
  int64_t n = 0;
  int64_t k = 0;
  std::vector<float> weights;  // [n, k]
  std::vector<float> inputs;   // [rows, k]
  Hessian hessian;
};

Layer MakeLayer(int64_t n, int64_t k, int64_t rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  Layer layer;
  layer.n = n;
  layer.k = k;
  for (int64_t i = 0; i < n * k; ++i) {
    layer.weights.push_back(0.02f * normal(random) * (uniform(random) < 0.01f ? 8.0f : 1.0f));
  }
  // Inputs share a few directions, and some columns are much larger than the others.
  constexpr int kDirections = 8;
  std::vector<float> mix(static_cast<size_t>(kDirections * k));
  for (float& value : mix) value = normal(random);
  for (int64_t row = 0; row < rows; ++row) {
    float common[kDirections];
    for (float& value : common) value = normal(random);
    for (int64_t i = 0; i < k; ++i) {
      float value = normal(random);
      for (int d = 0; d < kDirections; ++d)
        value += 0.7f * common[d] * mix[static_cast<size_t>(d * k + i)];
      layer.inputs.push_back(value * (i % 41 == 3 ? 12.0f : 1.0f));
    }
  }
  layer.hessian = Hessian(k);
  layer.hessian.Add(layer.inputs, 2);
  return layer;
}

// Squared error of the outputs, from the inputs themselves.
double OutputError(const Layer& layer, const std::vector<double>& quantized) {
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

double OutputError(const Layer& layer, const QuantizedMatrix& matrix) {
  const std::vector<float> dense = Dequantize(matrix);
  return OutputError(layer, std::vector<double>(dense.begin(), dense.end()));
}

// GPTQ as published: the inverse Hessian's upper Cholesky factor, columns in order, each error
// spread over the columns to its right; min-max scales per group from the weights as updated. With
// `outliers` > 0, so many of each group's weights with the largest error^2 / diag^2 are left out of
// the scale and kept, as SpQR does.
class ReferenceGptq {
 public:
  ReferenceGptq(const Layer& layer, double damping)
      : layer_(layer), k_(static_cast<size_t>(layer.k)) {
    std::vector<double> hessian(layer.hessian.values().begin(), layer.hessian.values().end());
    double mean = 0;
    for (size_t i = 0; i < k_; ++i) mean += hessian[i * k_ + i] / static_cast<double>(k_);
    for (size_t i = 0; i < k_; ++i) hessian[i * k_ + i] += damping * mean;
    const std::vector<double> lower = Cholesky(hessian);
    upper_ = Transpose(Cholesky(InverseFrom(lower)));
  }

  std::vector<double> Run(size_t group_size, size_t outliers) const {
    std::vector<double> result(layer_.weights.size());
    for (size_t n = 0; n < static_cast<size_t>(layer_.n); ++n) {
      std::vector<double> w(layer_.weights.begin() + static_cast<std::ptrdiff_t>(n * k_),
                            layer_.weights.begin() + static_cast<std::ptrdiff_t>((n + 1) * k_));
      double scale = 0;
      double zero = 0;
      std::vector<bool> kept(k_, false);
      for (size_t i = 0; i < k_; ++i) {
        if (i % group_size == 0) FitGroup(w, i, group_size, outliers, &kept, &scale, &zero);
        const double q = kept[i] ? w[i] : Round(w[i], scale, zero);
        result[n * k_ + i] = q;
        const double error = (w[i] - q) / upper_[i * k_ + i];
        for (size_t j = i; j < k_; ++j) w[j] -= error * upper_[i * k_ + j];
      }
    }
    return result;
  }

 private:
  static double Round(double w, double scale, double zero) {
    return scale * (std::clamp(std::nearbyint(w / scale) + zero, 0.0, 15.0) - zero);
  }
  void FitGroup(const std::vector<double>& w, size_t begin, size_t group_size, size_t outliers,
                std::vector<bool>* kept, double* scale, double* zero) const {
    const size_t end = std::min(begin + group_size, k_);
    const auto fit = [&] {
      double low = 0;
      double high = 0;
      for (size_t i = begin; i < end; ++i) {
        if ((*kept)[i]) continue;
        low = std::min(low, w[i]);
        high = std::max(high, w[i]);
      }
      *scale = std::max((high - low) / 15, 1e-9);
      *zero = std::nearbyint(-low / *scale);
    };
    fit();
    if (outliers == 0) return;
    // One by one: the weight that with its own group's scale gone from it gains most.
    for (size_t picked = 0; picked < outliers; ++picked) {
      size_t best = begin;
      double best_error = HUGE_VAL;
      for (size_t candidate = begin; candidate < end; ++candidate) {
        if ((*kept)[candidate]) continue;
        (*kept)[candidate] = true;
        fit();
        double error = 0;
        for (size_t i = begin; i < end; ++i) {
          if ((*kept)[i]) continue;
          const double difference = (w[i] - Round(w[i], *scale, *zero)) / upper_[i * k_ + i];
          error += difference * difference;
        }
        (*kept)[candidate] = false;
        if (error < best_error) {
          best_error = error;
          best = candidate;
        }
      }
      (*kept)[best] = true;
    }
    fit();
  }
  std::vector<double> Cholesky(const std::vector<double>& matrix) const {
    std::vector<double> lower(k_ * k_, 0.0);
    for (size_t i = 0; i < k_; ++i) {
      for (size_t j = 0; j <= i; ++j) {
        double sum = matrix[i * k_ + j];
        for (size_t p = 0; p < j; ++p) sum -= lower[i * k_ + p] * lower[j * k_ + p];
        lower[i * k_ + j] = i == j ? std::sqrt(sum) : sum / lower[j * k_ + j];
      }
    }
    return lower;
  }
  std::vector<double> InverseFrom(const std::vector<double>& lower) const {
    std::vector<double> inverse(k_ * k_);
    std::vector<double> x(k_);
    for (size_t column = 0; column < k_; ++column) {
      for (size_t i = 0; i < k_; ++i) {
        double sum = i == column ? 1.0 : 0.0;
        for (size_t p = 0; p < i; ++p) sum -= lower[i * k_ + p] * x[p];
        x[i] = sum / lower[i * k_ + i];
      }
      for (size_t i = k_; i-- > 0;) {
        double sum = x[i];
        for (size_t p = i + 1; p < k_; ++p) sum -= lower[p * k_ + i] * x[p];
        x[i] = sum / lower[i * k_ + i];
      }
      for (size_t i = 0; i < k_; ++i) inverse[i * k_ + column] = x[i];
    }
    return inverse;
  }
  std::vector<double> Transpose(const std::vector<double>& matrix) const {
    std::vector<double> result(matrix.size());
    for (size_t i = 0; i < k_; ++i) {
      for (size_t j = 0; j < k_; ++j) result[j * k_ + i] = matrix[i * k_ + j];
    }
    return result;
  }

  const Layer& layer_;
  const size_t k_;
  std::vector<double> upper_;
};

MatrixQuantizerOptions Options(int64_t group_size, double density) {
  MatrixQuantizerOptions options;
  options.group_size = group_size;
  options.density = density;
  return options;
}

QuantizedMatrix Quantize(const Layer& layer, const MatrixQuantizerOptions& options) {
  const auto factor = FactorHessian(layer.hessian, {.group_size = options.group_size});
  EXPECT_THAT(factor, IsOk());
  return QuantizeMatrixGptq(layer.weights, layer.n, *factor, options);
}

TEST(GptqQuantizerTest, OutputErrorIsNoWorseThanThatOfTheReference) {
  const Layer layer = MakeLayer(24, 256, 400, 1);
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

TEST(GptqQuantizerTest, OneGroupPerRowIsNoWorseThanTheReference) {
  const Layer layer = MakeLayer(24, 256, 400, 5);
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
  const Layer layer = MakeLayer(40, 384, 500, 2);
  for (const double density : {0.0, 0.02}) {
    const MatrixQuantizerOptions options = Options(128, density);
    const double rtn = OutputError(layer, QuantizeMatrix(layer.weights, layer.n, layer.k, options));
    EXPECT_LT(OutputError(layer, Quantize(layer, options)), 0.6 * rtn);
  }
}

TEST(GptqQuantizerTest, ReportsItsErrorsAndUsesTheWholeBudgetWithoutEmptySlots) {
  // 200 columns: the last group is short, and so is the last tile.
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{40, 200}, {33, 600}, {1, 128}}) {
    const Layer layer = MakeLayer(n, k, 300, 3);
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
  const Layer layer = MakeLayer(32, 256, 300, 4);
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
  const Layer layer = MakeLayer(100, 256, 300, 5);
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
  Layer layer = MakeLayer(16, 128, 200, 6);
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
  Layer layer = MakeLayer(16, 128, 200, 7);
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
  Layer layer = MakeLayer(8, 128, 100, 9);
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
  Layer layer = MakeLayer(8, 256, 100, 10);
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
  const Layer layer = MakeLayer(48, 256, 300, 8);
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
