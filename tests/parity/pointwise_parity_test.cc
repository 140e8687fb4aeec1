// RMSNorm, SiLU, embedding and row gathering against the oracle.
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

class PointwiseParityTest : public ParityTest {
 protected:
  std::vector<float> RunSilu(const std::vector<float>& gate_up, int32_t num_rows) {
    const DeviceBuffer in = UploadActs(gate_up);
    const DeviceBuffer out = UploadActZeros(static_cast<int64_t>(gate_up.size()) / 2);
    SiluAndMulParams params;
    params.num_rows = num_rows;
    params.intermediate = static_cast<int32_t>(gate_up.size()) / num_rows / 2;
    params.gate_up = in.data();
    params.out = out.data();
    FQ_EXPECT_OK(backend().SiluAndMul(params));
    return DownloadActs(out);
  }
};

TEST_P(PointwiseParityTest, RmsNormWithAndWithoutResidual) {
  for (const int32_t hidden : {1, 7, 16, 31, 64, 576, 2049}) {
    for (const int32_t rows : {1, 3, 17}) {
      for (const bool with_residual : {false, true}) {
        const std::vector<float> x = RoundToAct(RandomFloats(rows * hidden, 2.0f, 1));
        const std::vector<float> weight = RandomFloats(hidden, 1.0f, 2);
        const std::vector<float> residual = RoundToAct(RandomFloats(rows * hidden, 2.0f, 3));
        std::vector<double> expected_residual;
        if (with_residual) expected_residual.assign(residual.begin(), residual.end());
        const std::vector<double> expected =
            ReferenceRmsNorm(x, expected_residual, weight, rows, 1e-5);
        const DeviceBuffer x_device = UploadActs(x);
        const DeviceBuffer weight_device = Upload(weight);
        const DeviceBuffer residual_device = UploadActs(residual);
        RmsNormParams params;
        params.num_rows = rows;
        params.hidden = hidden;
        params.x = x_device.data();
        params.residual = with_residual ? residual_device.data() : nullptr;
        params.weight = weight_device.data();
        params.out = x_device.data();  // in place is allowed
        FQ_ASSERT_OK(backend().RmsNorm(params));
        // Each element is at most about sqrt(hidden) * weight; its own roundings are few. In BF16
        // they are those of the sum and of the output.
        std::vector<double> tolerance;
        for (const double value : expected) {
          tolerance.push_back(5.0 * 16 * kFloatRoundoff + 2.5 * ActRounding(value));
        }
        EXPECT_TRUE(AllWithin(DownloadActs(x_device), expected, tolerance)) << hidden;
        if (with_residual) {
          std::vector<double> sum_tolerance;
          for (const double value : expected_residual) {
            sum_tolerance.push_back(16 * kFloatRoundoff + ActRounding(value));
          }
          EXPECT_TRUE(AllWithin(DownloadActs(residual_device), expected_residual, sum_tolerance));
        }
      }
    }
  }
}

TEST_P(PointwiseParityTest, SiluAndMul) {
  for (const int32_t intermediate : {1, 5, 16, 33, 1536}) {
    for (const int32_t rows : {1, 4}) {
      const std::vector<float> gate_up = RoundToAct(RandomFloats(rows * 2 * intermediate, 3.0f, 5));
      const std::vector<double> expected = ReferenceSiluAndMul(gate_up, rows);
      std::vector<double> tolerance;
      for (const double value : expected)
        tolerance.push_back(16 * kFloatRoundoff * std::fabs(value) + ActRounding(value) + 1e-30);
      EXPECT_TRUE(AllWithin(RunSilu(gate_up, rows), expected, tolerance));
    }
  }
}

TEST_P(PointwiseParityTest, SiluOfExtremesNeitherOverflowsNorHidesNan) {
  std::vector<float> gate_up = {-1e30f, -200.0f, -89.0f, 0.0f, 89.0f, 1e30f, -1e-40f};
  gate_up.push_back(std::numeric_limits<float>::quiet_NaN());
  for (int i = 0; i < 8; ++i) gate_up.push_back(1.0f);
  const std::vector<float> out = RunSilu(gate_up, 1);
  EXPECT_NEAR(out[0], 0.0f, 1e-6f);
  EXPECT_NEAR(out[1], 0.0f, 1e-6f);
  EXPECT_NEAR(out[2], 0.0f, 1e-6f);
  EXPECT_EQ(out[3], 0.0f);
  EXPECT_EQ(out[4], 89.0f);
  EXPECT_EQ(out[5], RoundToAct(1e30f));
  EXPECT_NEAR(out[6], 0.0f, 1e-6f);
  EXPECT_TRUE(std::isnan(out[7]));
}

TEST_P(PointwiseParityTest, EmbeddingReadsEveryDenseTypeExactly) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kI8}) {
    for (const int64_t k : {1, 7, 64, 129}) {
      RandomLinearOptions options;
      options.n = 37;
      options.k = k;
      options.int4 = false;
      options.dense_dtype = dtype;
      const RandomLinear layer(options);
      const LinearPart part = layer.part();
      const ReferenceLinear reference = MakeReferenceLinear({&part, 1});
      const std::unique_ptr<LinearWeight> table = Pack({&part, 1});
      const std::vector<int32_t> ids = {0, 36, 16, 15, 36};
      std::vector<float> expected;
      for (const int32_t id : ids) {
        for (int64_t i = 0; i < k; ++i) {
          expected.push_back(
              RoundToAct(static_cast<float>(reference.weight[static_cast<size_t>(id * k + i)])));
        }
      }
      const DeviceBuffer id_device = Upload(ids);
      const DeviceBuffer out = UploadActZeros(static_cast<int64_t>(expected.size()));
      EmbeddingParams params;
      params.num_tokens = 5;
      params.token_ids = id_device.As<int32_t>();
      params.table = table.get();
      params.out = out.data();
      FQ_ASSERT_OK(backend().Embedding(params));
      EXPECT_TRUE(BitEqual(DownloadActs(out), expected)) << DTypeName(dtype) << " " << k;
    }
  }
}

TEST_P(PointwiseParityTest, EmbeddingTakesTheIdThatTheStepBeforeSampled) {
  RandomLinearOptions options;
  options.n = 20;
  options.k = 8;
  options.int4 = false;
  const RandomLinear layer(options);
  const LinearPart part = layer.part();
  const std::unique_ptr<LinearWeight> table = Pack({&part, 1});
  const auto lookup = [&](const std::vector<int32_t>& ids, const std::vector<int32_t>& rows) {
    const DeviceBuffer id_device = Upload(ids);
    const DeviceBuffer row_device = Upload(rows);
    const DeviceBuffer previous = Upload(std::vector<int32_t>{4, 17});
    const DeviceBuffer out = UploadActZeros(static_cast<int64_t>(ids.size()) * 8);
    EmbeddingParams params;
    params.num_tokens = static_cast<int32_t>(ids.size());
    params.token_ids = id_device.As<int32_t>();
    params.previous_rows = row_device.As<int32_t>();
    params.previous_tokens = previous.As<int32_t>();
    params.table = table.get();
    params.out = out.data();
    FQ_EXPECT_OK(backend().Embedding(params));
    return DownloadActs(out);
  };
  EXPECT_TRUE(BitEqual(lookup({0, 3, 0}, {1, -1, 0}), lookup({17, 3, 4}, {-1, -1, -1})));
}

TEST_P(PointwiseParityTest, GatherRowsCopiesRows) {
  const std::vector<float> in = RoundToAct(RandomFloats(6 * 33, 1.0f, 9));
  const DeviceBuffer in_device = UploadActs(in);
  const DeviceBuffer rows = Upload(std::vector<int32_t>{5, 0, 5, 2});
  const DeviceBuffer out = UploadActZeros(4 * 33);
  GatherRowsParams params;
  params.num_rows = 4;
  params.hidden = 33;
  params.row_indices = rows.As<int32_t>();
  params.in = in_device.data();
  params.out = out.data();
  FQ_ASSERT_OK(backend().GatherRows(params));
  std::vector<float> expected;
  for (const int row : {5, 0, 5, 2})
    expected.insert(expected.end(), in.begin() + row * 33, in.begin() + (row + 1) * 33);
  EXPECT_TRUE(BitEqual(DownloadActs(out), expected));
}

FQ_INSTANTIATE_PARITY(PointwiseParityTest);

}  // namespace
}  // namespace flashquant
