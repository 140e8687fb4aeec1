// The quantizer's heavy steps (QuantizerOps) on every backend against the functions they stand for
// on the CPU, and against sums in double: with the CPU's ops the same bits, on CUDA up to rounding.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "engine/quantize/checkpoint_quantizer.h"
#include "engine/quantize/gptq_quantizer.h"
#include "engine/quantize/group_curves.h"
#include "engine/quantize/hessian.h"
#include "engine/quantize/hessian_factor.h"
#include "engine/quantize/model_calibration.h"
#include "gtest/gtest.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/parity/quantizer_fixture.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(Backends, QuantizerParityTest, testing::ValuesIn(QuantizerKinds()),
                         [](const auto& kind) { return kind.param; });

TEST_P(QuantizerParityTest, MomentsAreTheSumsOfTheInputsOfAllCalls) {
  for (const int64_t k : {1, 5, 96, 200, 385}) {
    FQ_ASSERT_OK(ops().BeginInputs(7));  // forgotten by the next
    FQ_ASSERT_OK(ops().BeginInputs(k));
    std::vector<float> rows = CorrelatedRows(1 + 70 + 130, k, 1);
    for (size_t i = 2; i < rows.size(); i += static_cast<size_t>(k)) rows[i] = 0;  // dead
    const std::span<const float> all(rows);
    const size_t size = static_cast<size_t>(k);
    Add(all.first(size), k);
    Add(all.subspan(size, 70 * size), k);
    Add(all.subspan(71 * size), k);
    const auto moments = ops().InputMoments();
    const auto diagonal = ops().InputDiagonal();
    FQ_ASSERT_OK(moments);
    FQ_ASSERT_OK(diagonal);
    for (size_t i = 0; i < size; ++i) {
      for (size_t j = 0; j < size; ++j) {
        double sum = 0;
        double magnitude = 0;
        for (size_t row = 0; row < 201; ++row) {
          const double product =
              static_cast<double>(rows[row * size + i]) * static_cast<double>(rows[row * size + j]);
          sum += product;
          magnitude += std::fabs(product);
        }
        ASSERT_NEAR((*moments)[i * size + j], sum, 1e-5 * magnitude) << k;
        ASSERT_EQ((*moments)[i * size + j], (*moments)[j * size + i]);
      }
      EXPECT_EQ((*diagonal)[i], (*moments)[i * size + i]);
    }
    EXPECT_TRUE(*ops().InputsAreFinite());
    const std::vector<float> infinite(size, HUGE_VALF);
    Add(infinite, k);
    EXPECT_FALSE(*ops().InputsAreFinite());
  }
}

TEST_P(QuantizerParityTest, OutputEnergyIsThatOfTheInputs) {
  for (const int64_t k : {3, 128, 200}) {
    Load(CorrelatedRows(150, k, 2), k);
    const Hessian hessian = HostHessian();
    for (const int64_t n : {1, 37}) {
      const std::vector<float> errors = HeavyTailedWeights(n, k, 3);
      const double expected = hessian.Energy(errors, 1);
      const auto energy = ops().OutputEnergy(errors);
      FQ_ASSERT_OK(energy);
      EXPECT_NEAR(*energy, expected, 1e-12 * expected);
    }
  }
}

// Ordinary, singular, dead and empty inputs, in every group size.
TEST_P(QuantizerParityTest, FactorsHaveTheOrderTheDampingAndTheCostsOfTheHost) {
  for (const int64_t k : {32, 65, 128, 200, 450}) {
    std::vector<std::vector<float>> cases = {CorrelatedRows(2 * k, k, 4), CorrelatedRows(3, k, 5)};
    cases.push_back(cases[0]);  // with dead columns
    for (size_t i = 0; i < cases[2].size(); ++i) {
      if (static_cast<int64_t>(i) % k % 7 == 1) cases[2][i] = 0;
    }
    cases.emplace_back(static_cast<size_t>(k), 0.0f);
    cases.emplace_back(static_cast<size_t>(2 * k), 1e15f);
    for (size_t which = 0; which < cases.size(); ++which) {
      Load(cases[which], k);
      const Hessian hessian = HostHessian();
      for (const int64_t group_size : {int64_t{32}, int64_t{64}, int64_t{128}, k + k % 2}) {
        const HessianFactorOptions options = {.group_size = group_size};
        const auto expected = FactorHessian(hessian, options);
        const auto costs = FactorInputs(&ops(), options);
        FQ_ASSERT_OK(expected);
        FQ_ASSERT_OK(costs);
        EXPECT_EQ(costs->column_at, expected->column_at);
        EXPECT_EQ(costs->damping, expected->damping);
        for (size_t i = 0; i < static_cast<size_t>(k); ++i) {
          ASSERT_NEAR(costs->cost[i], expected->cost[i], 1e-7 * expected->cost[i])
              << k << " case " << which << " column " << i;
          ASSERT_NEAR(costs->importance[i], expected->importance[i], 1e-6);
        }
      }
    }
  }
}

TEST_P(QuantizerParityTest, AMatrixThatIsNotPositiveIsNotFactored) {
  constexpr int64_t kK = 150;
  Load(CorrelatedRows(kK, kK, 6), kK);
  std::vector<int32_t> order(kK);
  for (int32_t i = 0; i < kK; ++i) order[static_cast<size_t>(i)] = i;
  const auto positive = ops().Factor(order, 1.0, 1e-10);
  FQ_ASSERT_OK(positive);
  EXPECT_TRUE(positive->has_value());
  const auto negative = ops().Factor(order, -1e3, 1e-10);
  FQ_ASSERT_OK(negative);
  EXPECT_FALSE(negative->has_value());
}

struct CurveCase {
  int64_t group_size;
  int64_t length;
  bool symmetric;
  bool weighted;
};

TEST_P(QuantizerParityTest, CurvesAreThoseOfTheHost) {
  constexpr int64_t kN = 21;
  constexpr int64_t kK = 200;  // the last group is short, but for groups of 8 x 25
  std::vector<float> weights = HeavyTailedWeights(kN, kK, 7);
  const auto row = [&](size_t n) { return std::span(weights).subspan(n * kK, kK); };
  std::fill(row(3).begin(), row(3).end(), 0.0f);
  std::fill(row(4).begin(), row(4).end(), 0.25f);
  for (float& weight : row(5)) weight *= 1e-20f;
  for (float& weight : row(6)) weight *= 1e14f;
  for (size_t i = 0; i < kK; ++i) row(7)[i] = i % 3 == 0 ? 0.0f : row(7)[i];
  std::vector<float> importance(kK);
  for (size_t i = 0; i < kK; ++i) importance[i] = 1.0f / static_cast<float>(1 + i % 9);
  importance[11] = 0;
  int64_t differing = 0;
  int64_t total = 0;
  for (const CurveCase& c : std::vector<CurveCase>{{128, 14, false, true},
                                                   {128, 14, false, false},
                                                   {128, 1, false, true},
                                                   {128, 33, true, true},
                                                   {64, 11, false, true},
                                                   {64, 17, true, false},
                                                   {32, 9, false, true},
                                                   {32, 9, false, false}}) {
    const std::vector<double> factors(static_cast<size_t>((kK + c.group_size - 1) / c.group_size),
                                      3.5);
    CurveProblem problem;
    problem.weights = weights;
    problem.n = kN;
    problem.k = kK;
    problem.group_size = c.group_size;
    problem.symmetric = c.symmetric;
    problem.length = c.length;
    if (c.weighted) {
      problem.importance = importance;
      problem.group_factor = factors;
      problem.factor_scale = 0.25;
    }
    const GroupCurves expected = MakeGroupCurves(problem, 1);
    const auto curves = ops().Curves(problem);
    FQ_ASSERT_OK(curves);
    ASSERT_EQ(curves->errors.size(), expected.errors.size());
    ASSERT_EQ(curves->params.size(), expected.params.size());
    ASSERT_EQ(curves->error_without.size(), expected.error_without.size());
    for (size_t i = 0; i < expected.errors.size(); ++i) {
      const float wanted = expected.errors[i];
      ASSERT_EQ(std::isfinite(curves->errors[i]), std::isfinite(wanted)) << i;
      if (std::isfinite(wanted)) {
        // A candidate that is as good to the last bits may be chosen in place of another.
        ASSERT_NEAR(curves->errors[i], wanted, 2e-3f * wanted)
            << c.group_size << " x " << c.length << " entry " << i;
      }
      differing += curves->params[i] == expected.params[i] ? 0 : 1;
      ++total;
    }
    for (size_t i = 0; i < expected.error_without.size(); ++i) {
      ASSERT_NEAR(curves->error_without[i], expected.error_without[i],
                  2e-3 * expected.error_without[i]);
    }
  }
  RecordProperty("differing_params", std::to_string(differing));
  EXPECT_LE(differing, is_exact() ? 0 : total / 500) << "of " << total;
}

struct RowsCase {
  int64_t n;
  int64_t k;
  int64_t group_size;
  double density;
  int sweeps;
  bool symmetric = false;
};

// What two results differ in.
struct Difference {
  double codes = 0;     // share
  double outliers = 0;  // share of those that only one has
  double output_error = 0;
};

Difference Compare(const QuantizedMatrix& a, const QuantizedMatrix& b) {
  Difference difference;
  int64_t codes = 0;
  for (int64_t row = 0; row < a.weight.n; ++row) {
    for (int64_t i = 0; i < a.weight.k; ++i) {
      codes += a.weight.Code(row, i) != b.weight.Code(row, i) ? 1 : 0;
    }
  }
  difference.codes = static_cast<double>(codes) / static_cast<double>(a.weight.n * a.weight.k);
  const auto key = [](const TileCooSlot& slot) { return std::pair(slot.n, slot.k); };
  std::vector<std::pair<int32_t, int32_t>> in_a;
  std::vector<std::pair<int32_t, int32_t>> in_b;
  std::vector<std::pair<int32_t, int32_t>> both;
  for (const TileCooSlot& slot : a.outliers) in_a.push_back(key(slot));
  for (const TileCooSlot& slot : b.outliers) in_b.push_back(key(slot));
  std::set_intersection(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(),
                        std::back_inserter(both));
  if (!in_a.empty()) {
    difference.outliers = 1 - static_cast<double>(both.size()) / static_cast<double>(in_a.size());
  }
  difference.output_error = std::fabs(a.output_error / b.output_error - 1);
  return difference;
}

TEST_P(QuantizerParityTest, MatricesAreQuantizedAsOnTheHost) {
  for (const RowsCase& c : std::vector<RowsCase>{{70, 512, 128, 0.02, 4},
                                                 {70, 512, 128, 0.02, 0},
                                                 {70, 512, 128, 0, 4},
                                                 {96, 384, 64, 0.03, 2},
                                                 {40, 512, 32, 0.01, 4},
                                                 {64, 200, 128, 0.02, 4},
                                                 {33, 456, 64, 0.02, 4, true},
                                                 {50, 300, -1, 0.02, 3},
                                                 {50, 129, -1, 0, 3},
                                                 {1, 128, 128, 0.04, 4},
                                                 {3, 96, 32, 0, 1}}) {
    SCOPED_TRACE(testing::Message() << c.n << " x " << c.k << ", groups of " << c.group_size << ", "
                                    << c.density << ", sweeps " << c.sweeps);
    Load(CorrelatedRows(2 * c.k, c.k, 8), c.k);
    const std::vector<float> weights = HeavyTailedWeights(c.n, c.k, 9);
    MatrixQuantizerOptions options;
    options.group_size = c.group_size;
    options.density = c.density;
    options.symmetric = c.symmetric;
    options.descent_sweeps = c.sweeps;
    const HessianFactorOptions factoring = {.group_size =
                                                c.group_size == -1 ? c.k + c.k % 2 : c.group_size};
    const auto factor = FactorHessian(HostHessian(), factoring);
    FQ_ASSERT_OK(factor);
    const QuantizedMatrix expected = QuantizeMatrixGptq(weights, c.n, *factor, options);
    const auto costs = FactorInputs(&ops(), factoring);
    FQ_ASSERT_OK(costs);
    const auto matrix = QuantizeMatrixGptq(&ops(), weights, c.n, *costs, options);
    FQ_ASSERT_OK(matrix);
    EXPECT_EQ(matrix->outliers.size(), expected.outliers.size());
    EXPECT_NEAR(matrix->energy, expected.energy, 1e-9 * expected.energy);
    EXPECT_NEAR(matrix->output_energy, expected.output_energy, 1e-4 * expected.output_energy);
    const Difference difference = Compare(*matrix, expected);
    if (is_exact()) {
      EXPECT_EQ(Dequantize(*matrix), Dequantize(expected));
      EXPECT_EQ(matrix->output_error, expected.output_error);
      continue;
    }
    EXPECT_LE(difference.codes, 0.005);
    EXPECT_LE(difference.outliers, 0.02);
    EXPECT_LE(difference.output_error, 0.01);
    // What it reports is what it stores.
    const std::vector<float> dense = Dequantize(*matrix);
    std::vector<float> errors(weights.size());
    double error = 0;
    for (size_t i = 0; i < errors.size(); ++i) {
      errors[i] = weights[i] - dense[i];
      error += static_cast<double>(errors[i]) * static_cast<double>(errors[i]);
    }
    EXPECT_NEAR(matrix->error_with, error, 1e-5 * error);
    const double output_error = HostHessian().Energy(errors, 2);
    EXPECT_NEAR(matrix->output_error, output_error, 2e-3 * output_error);
  }
}

TEST_P(QuantizerParityTest, TheSameInputsGiveTheSameBitsAgain) {
  constexpr int64_t kK = 384;
  constexpr int64_t kN = 150;
  const std::vector<float> weights = HeavyTailedWeights(kN, kK, 10);
  MatrixQuantizerOptions options;
  options.density = 0.02;
  std::vector<std::vector<float>> results;
  for (int run = 0; run < 3; ++run) {
    Load(CorrelatedRows(500, kK, 11), kK);
    const auto costs = FactorInputs(&ops(), {.group_size = 128});
    FQ_ASSERT_OK(costs);
    const auto matrix = QuantizeMatrixGptq(&ops(), weights, kN, *costs, options);
    FQ_ASSERT_OK(matrix);
    results.push_back(Dequantize(*matrix));
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST_P(QuantizerParityTest, RowsWithoutTheirFactorAreRefused) {
  const std::vector<float> weights = HeavyTailedWeights(4, 64, 12);
  RowsProblem problem;
  problem.weights = weights;
  problem.n = 4;
  problem.k = 64;
  problem.group_size = 32;
  EXPECT_THAT(ops().SolveRows(problem),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("factor of")));
}

// A whole model: calibration through the backend's own forward pass, every layer quantized.
TEST_P(QuantizerParityTest, AModelIsQuantizedWithTheErrorsOfTheCpu) {
  const auto checkpoint = OpenCheckpoint(TestDataPath("tiny_models/qwen3"));
  FQ_ASSERT_OK(checkpoint);
  std::vector<int32_t> tokens;
  for (int i = 0; i < 1024; ++i) tokens.push_back((i * 37 + i * i / 7) % 512);
  const WorkDir dir;
  const auto run = [&](const std::string& kind, const std::string& name) {
    const auto calibration = ModelCalibration::Create(
        *checkpoint, tokens,
        {.text_path = "tokens", .context = 64, .backend = kind, .num_threads = 2});
    EXPECT_THAT(calibration, IsOk());
    QuantizeOptions options;
    options.method = QuantizeMethod::kGptq;
    options.group_size = 64;
    options.density = 0.02;
    options.num_threads = 2;
    options.ops = (*calibration)->ops();
    const auto report =
        QuantizeCheckpoint(*checkpoint, dir / name, options, nullptr, calibration->get());
    EXPECT_THAT(report, IsOk());
    return *report;
  };
  const QuantizeReport expected = run("cpu", "expected");
  const QuantizeReport report = run(GetParam(), "out");
  ASSERT_EQ(report.layers.size(), expected.layers.size());
  for (size_t i = 0; i < report.layers.size(); ++i) {
    const double wanted = expected.layers[i].relative_output_error();
    EXPECT_NEAR(report.layers[i].relative_output_error(), wanted, 0.05 * wanted)
        << report.layers[i].name;
    EXPECT_EQ(report.layers[i].stored_slots, expected.layers[i].stored_slots);
  }
  const double wanted = expected.Total().relative_output_error();
  EXPECT_NEAR(report.Total().relative_output_error(), wanted, 0.01 * wanted);
}

}  // namespace
}  // namespace flashquant
