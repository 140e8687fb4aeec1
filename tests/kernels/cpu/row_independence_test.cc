// A row's result is the same to the last bit whatever the number of rows, their place and what the
// others hold, NaN included (reliability rows T14 to T16).
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "tests/parity/parity_fixture.h"
#include "tests/support/random_weights.h"
#include "tests/support/tensor_matchers.h"

namespace flashquant {
namespace {

class RowIndependenceTest : public ParityTest {
 protected:
  // Runs the layer on `num_rows` rows of which row `place` is `row` and the others are `filler`
  // plus their index; returns the outputs of row `place`.
  std::vector<float> RunAmong(const LinearWeight& weight, const std::vector<float>& row,
                              int64_t num_rows, int64_t place, float filler) {
    std::vector<float> x;
    for (int64_t i = 0; i < num_rows; ++i) {
      for (const float value : row)
        x.push_back(i == place ? value : filler + static_cast<float>(i));
    }
    const std::vector<float> y = RunLinear(weight, x);
    return {y.begin() + place * weight.n(), y.begin() + (place + 1) * weight.n()};
  }

  void ExpectIndependence(const RandomLinearOptions& options) {
    const RandomLinear layer(options);
    const LinearPart part = layer.part();
    const std::unique_ptr<LinearWeight> weight = Pack({&part, 1});
    const std::vector<float> row = RandomFloats(options.k, 1.0f, 77);
    const std::vector<float> alone = RunLinear(*weight, row);
    for (int64_t num_rows = 1; num_rows <= 17; ++num_rows) {
      for (const int64_t place : {int64_t{0}, num_rows / 2, num_rows - 1}) {
        for (const float filler : {0.0f, 1e20f, std::nanf("")}) {
          EXPECT_TRUE(BitEqual(RunAmong(*weight, row, num_rows, place, filler), alone))
              << "row " << place << " of " << num_rows << ", others " << filler;
        }
      }
    }
  }
};

TEST_P(RowIndependenceTest, Int4WithOutliers) {
  RandomLinearOptions options;
  options.n = 90;
  options.k = 1100;
  options.density = 0.03;
  options.bias = true;
  ExpectIndependence(options);
  options.group_size = 32;
  options.n = 33;
  ExpectIndependence(options);
  options.group_size = -1;
  ExpectIndependence(options);
}

TEST_P(RowIndependenceTest, DenseTypes) {
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kI8}) {
    RandomLinearOptions options;
    options.n = 50;
    options.k = 700;
    options.int4 = false;
    options.dense_dtype = dtype;
    ExpectIndependence(options);
  }
}

TEST_P(RowIndependenceTest, PrefillOfManyRowsEqualsRowsAlone) {
  RandomLinearOptions options;
  options.n = 160;
  options.k = 640;
  options.density = 0.01;
  const RandomLinear layer(options);
  const LinearPart part = layer.part();
  const std::unique_ptr<LinearWeight> weight = Pack({&part, 1});
  const std::vector<float> x = RandomFloats(203 * options.k, 1.0f, 5);
  const std::vector<float> y = RunLinear(*weight, x);
  for (const int64_t row : {0, 7, 8, 100, 200, 202}) {
    const std::vector<float> one(x.begin() + row * options.k, x.begin() + (row + 1) * options.k);
    EXPECT_TRUE(BitEqual({y.data() + row * options.n, static_cast<size_t>(options.n)},
                         RunLinear(*weight, one)));
  }
}

TEST_P(RowIndependenceTest, ANonFiniteInputMakesItsRowNonFinite) {
  RandomLinearOptions options;
  options.n = 20;
  options.k = 300;
  const RandomLinear layer(options);
  const LinearPart part = layer.part();
  const std::unique_ptr<LinearWeight> weight = Pack({&part, 1});
  for (const float value : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    std::vector<float> x = RandomFloats(options.k, 1.0f, 5);
    x[150] = value;
    for (const float y : RunLinear(*weight, x)) EXPECT_FALSE(std::isfinite(y));
  }
}

FQ_INSTANTIATE_PARITY(RowIndependenceTest);

TEST(CpuTargetTest, DispatchFollowsTheTargetThatIsAskedFor) {
  for (const ParityTarget& target : ParityTargets()) {
    hwy::SetSupportedTargetsForTest(target.simd_target);
    hwy::GetChosenTarget().DeInit();
    EXPECT_STREQ(CpuTargetName(), hwy::TargetName(target.simd_target));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
}

}  // namespace
}  // namespace flashquant
