// The search for scale and zero point against an exhaustive search over all BF16 scales and zero
// points, written apart from the code under test.
#include "engine/quantize/int4_quantizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "gtest/gtest.h"

namespace flashquant {
namespace {

std::vector<float> RandomWeights(size_t count, uint32_t seed, float heavy_tail = 0.02f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.03f);
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  std::vector<float> weights(count);
  for (float& weight : weights) {
    weight = normal(random) * (uniform(random) < heavy_tail ? 8.0f : 1.0f);
  }
  return weights;
}

// Least error with the `left_out` largest errors dropped, over every BF16 scale up to the range.
double ExhaustiveError(const std::vector<float>& weights, bool symmetric, size_t left_out,
                       const std::vector<float>& importance = {}) {
  float range = 0;
  for (float weight : weights) range = std::max(range, std::fabs(weight));
  double best = std::numeric_limits<double>::infinity();
  const uint16_t top = ToBFloat16(range / 3.0f).bits;
  const uint16_t bottom = ToBFloat16(range / 400.0f).bits;
  for (uint16_t bits = bottom; bits <= top; ++bits) {
    const double scale = static_cast<double>(ToFloat(BFloat16{bits}));
    for (int zero = symmetric ? 8 : 0; zero <= (symmetric ? 8 : 15); ++zero) {
      std::vector<double> squared;
      for (size_t i = 0; i < weights.size(); ++i) {
        const double weight = static_cast<double>(weights[i]);
        const double code = std::clamp(std::nearbyint(weight / scale) + zero, 0.0, 15.0);
        const double error = weight - scale * (code - zero);
        squared.push_back(error * error *
                          (importance.empty() ? 1.0 : static_cast<double>(importance[i])));
      }
      std::sort(squared.begin(), squared.end());
      double sum = 0;
      for (size_t i = 0; i + left_out < squared.size(); ++i) sum += squared[i];
      best = std::min(best, sum);
    }
  }
  return best;
}

class GroupQuantizerSearchTest : public testing::TestWithParam<std::tuple<bool, int, int>> {};

TEST_P(GroupQuantizerSearchTest, FindsNearlyTheLeastErrorOfAnExhaustiveSearch) {
  const auto [symmetric, count, left_out] = GetParam();
  double found_sum = 0;
  double least_sum = 0;
  for (uint32_t seed = 1; seed <= 8; ++seed) {
    const std::vector<float> weights = RandomWeights(static_cast<size_t>(count), seed);
    GroupQuantizer quantizer(symmetric);
    std::vector<double> errors(static_cast<size_t>(left_out) + 1);
    std::vector<GroupParams> params(errors.size());
    quantizer.ErrorCurve(weights, errors, params);
    const double found = quantizer.Refine(weights, left_out, &params.back());
    const double least = ExhaustiveError(weights, symmetric, static_cast<size_t>(left_out));
    EXPECT_GE(found, least * 0.9999) << "seed " << seed;
    EXPECT_LE(found, least * 1.10) << "seed " << seed;
    found_sum += found;
    least_sum += least;
  }
  EXPECT_LE(found_sum, least_sum * 1.02);
}

// Errors that count differently, some hardly at all. The grid is made for equal ones, so the bound
// is wider.
TEST_P(GroupQuantizerSearchTest, FindsNearlyTheLeastWeightedError) {
  const auto [symmetric, count, left_out] = GetParam();
  double found_sum = 0;
  double least_sum = 0;
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    const std::vector<float> weights = RandomWeights(static_cast<size_t>(count), seed);
    std::mt19937 random(seed + 100);
    std::uniform_real_distribution<float> uniform(-7.0f, 0.0f);
    std::vector<float> importance(weights.size());
    for (float& factor : importance) factor = std::exp2(uniform(random));
    GroupQuantizer quantizer(symmetric);
    quantizer.SetImportance(importance);
    std::vector<double> errors(static_cast<size_t>(left_out) + 1);
    std::vector<GroupParams> params(errors.size());
    quantizer.ErrorCurve(weights, errors, params);
    const double found = quantizer.Refine(weights, left_out, &params.back());
    const double least =
        ExhaustiveError(weights, symmetric, static_cast<size_t>(left_out), importance);
    EXPECT_GE(found, least * 0.9999) << "seed " << seed;
    found_sum += found;
    least_sum += least;
  }
  EXPECT_LE(found_sum, least_sum * 1.3);
}

INSTANTIATE_TEST_SUITE_P(Groups, GroupQuantizerSearchTest,
                         testing::Combine(testing::Bool(), testing::Values(32, 64, 128),
                                          testing::Values(0, 1, 4)));

TEST(GroupQuantizerTest, ErrorCurveNeverRisesWithTheNumberOfOutliers) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    const std::vector<float> weights = RandomWeights(128, seed, 0.1f);
    GroupQuantizer quantizer(false);
    std::vector<double> errors(33);
    std::vector<GroupParams> params(errors.size());
    quantizer.ErrorCurve(weights, errors, params);
    for (size_t j = 1; j < errors.size(); ++j) EXPECT_LE(errors[j], errors[j - 1]);
    EXPECT_LT(errors[32], 0.5 * errors[0]);
  }
}

TEST(GroupQuantizerTest, ErrorOfTheCurveIsTheErrorOfItsParams) {
  const std::vector<float> weights = RandomWeights(64, 7);
  GroupQuantizer quantizer(false);
  std::vector<double> errors(9);
  std::vector<GroupParams> params(errors.size());
  quantizer.ErrorCurve(weights, errors, params);
  for (size_t j = 0; j < errors.size(); ++j) {
    std::vector<int32_t> left_out;
    quantizer.LargestErrors(weights, params[j], static_cast<int>(j), &left_out);
    double sum = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (std::count(left_out.begin(), left_out.end(), static_cast<int32_t>(i)) > 0) continue;
      const double value = static_cast<double>(ToFloat(params[j].scale)) *
                           (EncodeInt4(weights[i], params[j]) - params[j].zero);
      sum += (static_cast<double>(weights[i]) - value) * (static_cast<double>(weights[i]) - value);
    }
    EXPECT_NEAR(sum, errors[j], 1e-5 * errors[j]);
  }
}

TEST(GroupQuantizerTest, RefineNeverMakesAGroupWorse) {
  std::mt19937 random(3);
  for (uint32_t seed = 1; seed <= 50; ++seed) {
    const std::vector<float> weights = RandomWeights(128, seed);
    GroupQuantizer quantizer(false);
    GroupParams params{ToBFloat16(0.002f * static_cast<float>(1 + random() % 20)),
                       static_cast<uint8_t>(random() % 16)};
    const int left_out = static_cast<int>(random() % 5);
    const double before = quantizer.Error(weights, params, left_out);
    const double after = quantizer.Refine(weights, left_out, &params);
    EXPECT_LE(after, before);
    EXPECT_DOUBLE_EQ(after, quantizer.Error(weights, params, left_out));
  }
}

TEST(GroupQuantizerTest, AllZeroGroupIsExactAndOffersNoOutlier) {
  const std::vector<float> weights(32, 0.0f);
  GroupQuantizer quantizer(false);
  std::vector<double> errors(3);
  std::vector<GroupParams> params(3);
  quantizer.ErrorCurve(weights, errors, params);
  EXPECT_EQ(errors[0], 0);
  EXPECT_TRUE(std::isinf(errors[1]));
  EXPECT_EQ(EncodeInt4(0.0f, params[0]), params[0].zero);
}

TEST(GroupQuantizerTest, SingleWeightIsExactWithinBFloat16) {
  for (const float weight : {1.5f, -0.75f, 1e-10f, -3e10f, 9e14f}) {
    GroupQuantizer quantizer(false);
    const GroupParams params = quantizer.Fit(std::vector<float>{weight});
    const float value =
        ToFloat(params.scale) * static_cast<float>(EncodeInt4(weight, params) - params.zero);
    EXPECT_NEAR(value / weight, 1.0f, 0.004f) << weight;
  }
}

TEST(GroupQuantizerTest, GroupOfTinyWeightsIsStoredAsZeros) {
  const std::vector<float> weights = {1e-13f, -1e-20f, 1e-38f, 1e-44f, 0.0f};
  GroupQuantizer quantizer(false);
  std::vector<double> errors(3);
  std::vector<GroupParams> params(3);
  quantizer.ErrorCurve(weights, errors, params);
  EXPECT_LE(quantizer.Refine(weights, 0, &params[0]), 1e-25);
  EXPECT_EQ(params[0].scale.bits, 0);
  EXPECT_EQ(EncodeInt4(weights[0], params[0]), params[0].zero);
  EXPECT_TRUE(std::isinf(errors[1]));
}

TEST(GroupQuantizerTest, WeightsFarApartInMagnitudeGiveFiniteParams) {
  std::vector<float> weights(64, 1e-30f);
  weights[3] = 1e15f;
  weights[4] = -1e-11f;
  GroupQuantizer quantizer(false);
  std::vector<double> errors(9);
  std::vector<GroupParams> params(9);
  quantizer.ErrorCurve(weights, errors, params);
  for (size_t j = 0; j < errors.size(); ++j) {
    EXPECT_TRUE(std::isfinite(errors[j])) << j;
    EXPECT_TRUE(IsFinite(params[j].scale)) << j;
  }
}

TEST(GroupQuantizerTest, WeightsOfOneSignUseTheWholeCodeRange) {
  std::vector<float> weights(64);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = 0.01f * static_cast<float>(i + 1);
  GroupQuantizer quantizer(false);
  const GroupParams params = quantizer.Fit(weights);
  EXPECT_EQ(params.zero, 0);
  EXPECT_EQ(EncodeInt4(weights.back(), params), 15);
}

TEST(GroupQuantizerTest, LargestErrorsPutsZeroWeightsLastAndBreaksTiesByMagnitude) {
  // Scale 1, zero 8: errors 0, 0, 0.5 (2.5 rounds to 2), 0.
  const std::vector<float> weights = {0.0f, 3.0f, 2.5f, -4.0f};
  GroupQuantizer quantizer(false);
  std::vector<int32_t> indices;
  quantizer.LargestErrors(weights, {ToBFloat16(1.0f), 8}, 4, &indices);
  EXPECT_EQ(indices, (std::vector<int32_t>{2, 3, 1, 0}));
}

}  // namespace
}  // namespace flashquant
