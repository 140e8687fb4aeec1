// One byte budget for a model's outliers: how it is shared out, and what comes of it.
#include "engine/quantize/density_budget.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "engine/quantize/checkpoint_quantizer.h"
#include "engine/quantize/model_calibration.h"
#include "gtest/gtest.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

TEST(ShareRecordsTest, TheCurveThatFallsMostPerRecordComesFirst) {
  const std::vector<LayerCurve> curves = {{"steep", {0, 10, 20}, {1.0, 0.5, 0.375}},
                                          {"flat", {0, 10, 20}, {1.0, 0.75, 0.625}}};
  EXPECT_EQ(ShareRecords(curves, 0), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(ShareRecords(curves, 4), (std::vector<int64_t>{4, 0}));
  EXPECT_EQ(ShareRecords(curves, 15), (std::vector<int64_t>{10, 5}));
  EXPECT_EQ(ShareRecords(curves, 25), (std::vector<int64_t>{15, 10})) << "ties: the earlier one";
  EXPECT_EQ(ShareRecords(curves, 1000), (std::vector<int64_t>{20, 20}));
}

TEST(ShareRecordsTest, ACurveThatFallsLateIsTakenByItsHullAndOneThatRisesNotAtAll) {
  const std::vector<LayerCurve> curves = {{"late", {0, 10, 20}, {1.0, 0.99, 0.2}},
                                          {"even", {0, 10, 20}, {1.0, 0.7, 0.65}},
                                          {"none", {0, 10, 20}, {1.0, 1.0, 1.1}},
                                          {"tiny", {0, 0, 0}, {1.0, 0.5, 0.2}}};
  EXPECT_EQ(ShareRecords(curves, 20), (std::vector<int64_t>{20, 0, 0, 0}));
  EXPECT_EQ(ShareRecords(curves, 1000), (std::vector<int64_t>{20, 20, 0, 0}));
}

// For concave gains, greedy by rate is the best there is: against every other split.
TEST(ShareRecordsTest, NoOtherSplitHasALowerError) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int round = 0; round < 50; ++round) {
    std::vector<LayerCurve> curves(3);
    for (LayerCurve& curve : curves) {
      double step = uniform(random);
      curve.error = {3.0};
      for (int i = 0; i <= 6; ++i) curve.records.push_back(i);
      for (int i = 0; i < 6; ++i) {
        curve.error.push_back(curve.error.back() - step);
        step *= uniform(random);
      }
    }
    const int64_t budget = static_cast<int64_t>(random() % 15);
    const auto error = [&](int64_t a, int64_t b, int64_t c) {
      return curves[0].error[static_cast<size_t>(a)] + curves[1].error[static_cast<size_t>(b)] +
             curves[2].error[static_cast<size_t>(c)];
    };
    double best = HUGE_VAL;
    for (int64_t a = 0; a <= 6; ++a) {
      for (int64_t b = 0; b <= 6; ++b) {
        for (int64_t c = 0; c <= 6; ++c) {
          if (a + b + c <= budget) best = std::min(best, error(a, b, c));
        }
      }
    }
    const std::vector<int64_t> records = ShareRecords(curves, budget);
    EXPECT_LE(std::accumulate(records.begin(), records.end(), int64_t{0}), budget);
    EXPECT_NEAR(error(records[0], records[1], records[2]), best, 1e-12);
  }
}

class TargetSizeTest : public testing::Test {
 protected:
  void SetUp() override {
    auto checkpoint = OpenCheckpoint(TestDataPath("tiny_models/llama"));
    FQ_ASSERT_OK(checkpoint);
    checkpoint_ = std::make_unique<Checkpoint>(*std::move(checkpoint));
  }

  absl::StatusOr<QuantizeReport> Quantize(const std::string& output, QuantizeOptions options) {
    if (options.method == QuantizeMethod::kRtn) {
      return QuantizeCheckpoint(*checkpoint_, output, options, nullptr);
    }
    std::vector<int32_t> tokens(768);
    std::mt19937 random(1);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 512);
    ModelCalibrationOptions calibration_options;
    calibration_options.text_path = "text";
    calibration_options.context = 48;
    auto calibration = ModelCalibration::Create(*checkpoint_, tokens, calibration_options);
    if (!calibration.ok()) return calibration.status();
    return QuantizeCheckpoint(*checkpoint_, output, options, nullptr, calibration->get());
  }

  // Sum over the layers of the squared relative error that the method looks at.
  static double SumOfErrors(const QuantizeReport& report) {
    double sum = 0;
    for (const LayerReport& layer : report.layers) {
      const double error =
          layer.output_error >= 0 ? layer.relative_output_error() : layer.relative_error_with();
      sum += error * error;
    }
    return sum;
  }

  const WorkDir dir_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

TEST_F(TargetSizeTest, TheBytesAreKeptAndTheErrorIsLowerThanWithOneDensity) {
  for (const QuantizeMethod method : {QuantizeMethod::kRtn, QuantizeMethod::kGptq}) {
    const std::string name = method == QuantizeMethod::kRtn ? "rtn" : "gptq";
    QuantizeOptions options;
    options.method = method;
    options.density = 0.02;
    const auto even = Quantize(dir_ / (name + "_even"), options);
    FQ_ASSERT_OK(even);
    options.target_bytes = even->tensor_bytes;
    const auto shared = Quantize(dir_ / (name + "_shared"), options);
    FQ_ASSERT_OK(shared);
    EXPECT_LE(shared->tensor_bytes, options.target_bytes);
    EXPECT_GT(shared->tensor_bytes, options.target_bytes - 2000);
    EXPECT_EQ(shared->target_bytes, options.target_bytes);
    EXPECT_EQ(shared->target_density, 0);
    EXPECT_LT(SumOfErrors(*shared), SumOfErrors(*even)) << name;
    double least = 1;
    double most = 0;
    for (const LayerReport& layer : shared->layers) {
      least = std::min(least, layer.stored_density());
      most = std::max(most, layer.stored_density());
    }
    EXPECT_GT(most, 1.2 * least) << name;
  }
}

TEST_F(TargetSizeTest, OutputIsTheSameForAnyNumberOfThreads) {
  QuantizeOptions options;
  options.method = QuantizeMethod::kGptq;
  options.target_bytes = 420000;
  options.lm_head = TableFormat::kInt4;
  FQ_ASSERT_OK(Quantize(dir_ / "one", options));
  options.num_threads = 3;
  FQ_ASSERT_OK(Quantize(dir_ / "three", options));
  EXPECT_EQ(FolderBytes(dir_ / "one"), FolderBytes(dir_ / "three"));
}

TEST_F(TargetSizeTest, MoreBytesThanOutliersCanUseAreNotUsed) {
  QuantizeOptions options;
  options.target_bytes = int64_t{1} << 40;
  const auto report = Quantize(dir_ / "out", options);
  FQ_ASSERT_OK(report);
  for (const LayerReport& layer : report->layers) {
    EXPECT_LE(layer.stored_density(), MeasuredDensities().back());
  }
}

TEST_F(TargetSizeTest, WhatCannotBeIsRefusedBeforeAnythingIsWritten) {
  QuantizeOptions options;
  options.target_bytes = 100000;
  EXPECT_THAT(Quantize(dir_ / "out", options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("bytes without any outlier (got 100000)")));
  options.target_bytes = 420000;
  options.group_size = -1;
  EXPECT_THAT(Quantize(dir_ / "out", options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--group-size -1")));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

}  // namespace
}  // namespace flashquant
