// Whole matrices: what the result promises (slots, codes, errors), checked from the result alone.
#include "engine/quantize/matrix_quantizer.h"

#include <cmath>
#include <map>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "kernels/base/bfloat16.h"

namespace flashquant {
namespace {

struct Shape {
  int64_t n;
  int64_t k;
};

std::vector<float> RandomMatrix(const Shape& shape, uint32_t seed) {
  std::mt19937 random(seed);
  std::student_t_distribution<float> heavy(4.0f);
  std::vector<float> weights(static_cast<size_t>(shape.n * shape.k));
  for (float& weight : weights) weight = ToFloat(ToBFloat16(0.02f * heavy(random)));
  return weights;
}

MatrixQuantizerOptions Options(int64_t group_size, double density) {
  MatrixQuantizerOptions options;
  options.group_size = group_size;
  options.density = density;
  return options;
}

// Sum of squared differences between `weights` and what the result dequantizes to.
double ErrorOf(const QuantizedMatrix& result, const std::vector<float>& weights) {
  const Int4Weight& weight = result.weight;
  std::map<std::pair<int64_t, int64_t>, float> outliers;
  for (const TileCooSlot& slot : result.outliers) {
    outliers[{slot.n, slot.k}] = ToFloat(BFloat16{slot.value_bits});
  }
  double error = 0;
  for (int64_t n = 0; n < weight.n; ++n) {
    for (int64_t k = 0; k < weight.k; ++k) {
      const int64_t group = k / weight.group_size;
      const float scale =
          ToFloat(weight.scales[static_cast<size_t>(n * weight.groups_per_row() + group)]);
      float value = scale * static_cast<float>(weight.Code(n, k) - weight.ZeroPoint(n, group));
      if (const auto it = outliers.find({n, k}); it != outliers.end()) {
        EXPECT_EQ(value, 0.0f) << "code under an outlier must be the zero point";
        value += it->second;
      }
      const double difference =
          static_cast<double>(weights[static_cast<size_t>(n * weight.k + k)] - value);
      error += difference * difference;
    }
  }
  return error;
}

class MatrixQuantizerTest : public testing::TestWithParam<std::tuple<int, int, bool>> {};

TEST_P(MatrixQuantizerTest, ResultIsValidAndItsErrorIsWhatItReports) {
  const auto [group_size, rule, symmetric] = GetParam();
  for (const Shape& shape : {Shape{16, 384}, Shape{9, 200}, Shape{1, 33}, Shape{8, 256}}) {
    const std::vector<float> weights = RandomMatrix(shape, 11);
    MatrixQuantizerOptions options = Options(group_size, 0.02);
    options.rule = static_cast<OutlierRule>(rule);
    options.symmetric = symmetric;
    const QuantizedMatrix result = QuantizeMatrix(weights, shape.n, shape.k, options);
    EXPECT_TRUE(ValidateInt4Weight(result.weight).ok()) << ValidateInt4Weight(result.weight);
    EXPECT_EQ(result.weight.zeros.empty(), symmetric);
    EXPECT_NEAR(ErrorOf(result, weights), result.error_with, 1e-6 * result.error_without);
    EXPECT_LE(result.error_with, result.error_without * 1.0001);
    EXPECT_LE(static_cast<double>(result.outliers.size()),
              0.02 * static_cast<double>(shape.n * shape.k));
  }
}

INSTANTIATE_TEST_SUITE_P(GroupsAndRules, MatrixQuantizerTest,
                         testing::Combine(testing::Values(32, 64, 128, -1),
                                          testing::Values(0, 1, 2), testing::Bool()));

TEST(MatrixQuantizerSlotTest, EverySlotOfTheBudgetIsUsedAndNoRecordHasPadding) {
  const Shape shape{32, 600};
  const std::vector<float> weights = RandomMatrix(shape, 5);
  for (const int64_t group_size : {int64_t{32}, int64_t{128}, int64_t{-1}}) {
    for (const double density : {0.005, 0.01, 0.03}) {
      const QuantizedMatrix result =
          QuantizeMatrix(weights, shape.n, shape.k, Options(group_size, density));
      const int64_t budget = static_cast<int64_t>(density * 32 * 600 / 4);
      EXPECT_EQ(static_cast<int64_t>(result.outliers.size()), 4 * budget);
      std::map<std::pair<int64_t, int64_t>, int> per_tile_column;
      std::set<std::pair<int64_t, int64_t>> places;
      for (const TileCooSlot& slot : result.outliers) {
        ++per_tile_column[{slot.k / 256, slot.n}];
        EXPECT_TRUE(places.insert({slot.k, slot.n}).second);
        EXPECT_EQ(slot.value_bits,
                  ToBFloat16(weights[static_cast<size_t>(slot.n * 600 + slot.k)]).bits);
      }
      for (const auto& [place, count] : per_tile_column) EXPECT_EQ(count % 4, 0);
    }
  }
}

TEST(MatrixQuantizerSlotTest, ErrorFallsWithDensity) {
  const Shape shape{12, 512};
  const std::vector<float> weights = RandomMatrix(shape, 6);
  for (const int64_t group_size : {int64_t{128}, int64_t{-1}}) {
    double before = HUGE_VAL;
    for (const double density : {0.0, 0.01, 0.02, 0.03, 0.05, 0.1}) {
      const QuantizedMatrix result =
          QuantizeMatrix(weights, shape.n, shape.k, Options(group_size, density));
      EXPECT_LT(result.error_with, before) << density;
      before = result.error_with;
      if (density == 0) {
        EXPECT_TRUE(result.outliers.empty());
        EXPECT_NEAR(result.error_with, result.error_without, 1e-6 * result.error_without);
      }
    }
  }
}

TEST(MatrixQuantizerSlotTest, RescalingRuleBeatsErrorRuleBeatsMagnitudeRule) {
  const Shape shape{16, 768};
  const std::vector<float> weights = RandomMatrix(shape, 7);
  MatrixQuantizerOptions options = Options(128, 0.02);
  options.rule = OutlierRule::kMagnitude;
  const double magnitude = QuantizeMatrix(weights, shape.n, shape.k, options).error_with;
  options.rule = OutlierRule::kErrorWithRescale;
  const double rescale = QuantizeMatrix(weights, shape.n, shape.k, options).error_with;
  EXPECT_LT(rescale, 0.97 * magnitude);
}

TEST(MatrixQuantizerSlotTest, NumberOfThreadsDoesNotChangeAByte) {
  const Shape shape{26, 520};
  const std::vector<float> weights = RandomMatrix(shape, 8);
  for (const int64_t group_size : {int64_t{64}, int64_t{-1}}) {
    MatrixQuantizerOptions options = Options(group_size, 0.02);
    const QuantizedMatrix one = QuantizeMatrix(weights, shape.n, shape.k, options);
    for (const int threads : {2, 7}) {
      options.num_threads = threads;
      const QuantizedMatrix many = QuantizeMatrix(weights, shape.n, shape.k, options);
      EXPECT_EQ(many.weight.qweight, one.weight.qweight);
      EXPECT_EQ(many.weight.scales, one.weight.scales);
      EXPECT_EQ(many.weight.zeros, one.weight.zeros);
      EXPECT_EQ(many.error_with, one.error_with);
      ASSERT_EQ(many.outliers.size(), one.outliers.size());
      for (size_t i = 0; i < one.outliers.size(); ++i) {
        EXPECT_EQ(many.outliers[i].k, one.outliers[i].k);
        EXPECT_EQ(many.outliers[i].n, one.outliers[i].n);
        EXPECT_EQ(many.outliers[i].value_bits, one.outliers[i].value_bits);
      }
    }
  }
}

TEST(MatrixQuantizerSlotTest, ZeroWeightsAreExactAndGetNoSlot) {
  const Shape shape{16, 256};
  std::vector<float> weights(static_cast<size_t>(shape.n * shape.k), 0.0f);
  weights[5] = 3.0f;
  weights[6] = -0.0f;
  weights[700] = -1e-3f;
  for (const int rule : {0, 1, 2}) {
    MatrixQuantizerOptions options = Options(128, 0.05);
    options.rule = static_cast<OutlierRule>(rule);
    const QuantizedMatrix result = QuantizeMatrix(weights, shape.n, shape.k, options);
    for (const TileCooSlot& slot : result.outliers) EXPECT_NE(slot.value_bits & 0x7fff, 0);
    EXPECT_LE(result.error_with, 1e-4);
  }
}

TEST(MatrixQuantizerSlotTest, PaddingCodesEqualTheZeroPointAndPaddingRowsHaveScaleZero) {
  const Shape shape{11, 172};
  const std::vector<float> weights = RandomMatrix(shape, 9);
  const Int4Weight weight = QuantizeMatrix(weights, shape.n, shape.k, Options(64, 0.01)).weight;
  EXPECT_EQ(weight.n_padded, 16);
  EXPECT_EQ(weight.k_padded, 192);
  for (int64_t n = 0; n < 16; ++n) {
    for (int64_t k = 0; k < 192; ++k) {
      if (n < 11 && k < 172) continue;
      EXPECT_EQ(weight.Code(n, k), weight.ZeroPoint(n, k / 64));
    }
    for (int64_t group = 0; group < 3 && n >= 11; ++group) {
      EXPECT_EQ(weight.scales[static_cast<size_t>(n * 3 + group)].bits, 0);
    }
  }
}

}  // namespace
}  // namespace flashquant
