// The linear op against the oracle: INT4 with and without outliers, dense types, joined parts.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include "tests/parity/parity_fixture.h"
#include "tests/support/random_weights.h"
#include "tests/support/reference_ops.h"
#include "tests/support/tensor_matchers.h"

namespace flashquant {
namespace {

class LinearParityTest : public ParityTest {
 protected:
  void ExpectParity(std::span<const LinearPart> parts, int64_t num_rows) {
    const ReferenceLinear linear = MakeReferenceLinear(parts);
    const std::vector<float> x = RoundToAct(RandomFloats(num_rows * linear.k, 1.0f, 7));
    const ReferenceProduct expected = MultiplyReference(linear, x, num_rows);
    const std::unique_ptr<LinearWeight> weight = Pack(parts);
    ASSERT_NE(weight, nullptr);
    EXPECT_EQ(weight->n(), linear.n);
    EXPECT_EQ(weight->k(), linear.k);
    const std::vector<float> y = RunLinear(*weight, x);
    EXPECT_TRUE(AllWithin(y, expected.y, Tolerance(expected, linear.k)))
        << linear.n << " x " << linear.k << ", rows " << num_rows;
    std::vector<double> rounded = Tolerance(expected, linear.k);
    for (size_t i = 0; i < rounded.size(); ++i) rounded[i] += ActRounding(2 * expected.y[i]);
    EXPECT_TRUE(AllWithin(RunLinear(*weight, x, /*float_outputs=*/false), expected.y, rounded));
  }
  // Weights that are held in BF16 are each off by up to a roundoff, independently: their errors
  // grow as the square root of their number, magnitudes as the number itself. FP32 outputs may have
  // been rounded to the activation type on their way.
  std::vector<double> Tolerance(const ReferenceProduct& expected, int64_t k) const {
    std::vector<double> tolerance = SumTolerance(expected.magnitude, k);
    const double share = std::min(1.0, 4.0 / std::sqrt(static_cast<double>(k)));
    for (size_t i = 0; i < tolerance.size(); ++i) {
      tolerance[i] += ActRounding(expected.magnitude[i]) * share + ActRounding(expected.y[i]);
    }
    return tolerance;
  }
  void ExpectParity(const RandomLinearOptions& options, int64_t num_rows) {
    const RandomLinear layer(options);
    const LinearPart part = layer.part();
    ExpectParity({&part, 1}, num_rows);
  }
};

RandomLinearOptions Int4(int64_t n, int64_t k, int64_t group_size, double density) {
  RandomLinearOptions options;
  options.n = n;
  options.k = k;
  options.group_size = group_size;
  options.density = density;
  return options;
}

RandomLinearOptions Dense(int64_t n, int64_t k, DType dtype) {
  RandomLinearOptions options;
  options.n = n;
  options.k = k;
  options.int4 = false;
  options.dense_dtype = dtype;
  return options;
}

TEST_P(LinearParityTest, Int4ShapesAroundABlock) {
  for (const int64_t n : {1, 7, 15, 16, 17, 33, 64, 65, 80}) {
    for (const int64_t k : {1, 2, 31, 127, 128, 129, 511, 513})
      ExpectParity(Int4(n, k, 128, 0.02), 3);
  }
}

TEST_P(LinearParityTest, Int4GroupSizesAndDensities) {
  for (const int64_t group_size : {-1, 32, 64, 128}) {
    for (const double density : {0.0, 0.001, 0.01, 0.03, 0.1}) {
      ExpectParity(Int4(40, 576, group_size, density), 2);
    }
  }
}

TEST_P(LinearParityTest, Int4OddAndPaddedInputs) {
  for (const int64_t group_size : {-1, 32, 64, 128}) {
    for (const int64_t k : {3, 33, 95, 257, 515, 1027}) {
      ExpectParity(Int4(23, k, group_size, 0.05), 4);
    }
  }
}

TEST_P(LinearParityTest, Int4EveryRowCountToSeventeen) {
  for (int64_t rows = 1; rows <= 17; ++rows) ExpectParity(Int4(72, 640, 64, 0.02), rows);
}

TEST_P(LinearParityTest, Int4Symmetric) {
  RandomLinearOptions options = Int4(48, 384, 128, 0.01);
  options.symmetric = true;
  ExpectParity(options, 5);
  options.group_size = -1;
  ExpectParity(options, 9);
}

TEST_P(LinearParityTest, DenseTypesShapesAndRows) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kI8}) {
    for (const int64_t k : {1, 5, 128, 515}) ExpectParity(Dense(33, k, dtype), 2);
    for (const int64_t rows : {1, 4, 6, 8, 9, 20}) ExpectParity(Dense(97, 320, dtype), rows);
  }
}

TEST_P(LinearParityTest, PartsOfDifferentKindsJoinWithTheirBias) {
  RandomLinearOptions q = Int4(40, 256, 64, 0.02);
  q.bias = true;
  RandomLinearOptions k = Int4(24, 256, 128, 0.0);
  k.seed = 2;
  RandomLinearOptions v = Dense(17, 256, DType::kBF16);
  v.bias = true;
  const RandomLinear q_layer(q);
  const RandomLinear k_layer(k);
  const RandomLinear v_layer(v);
  const RandomLinear scaled_layer(Dense(9, 256, DType::kI8));
  const std::vector<LinearPart> parts = {q_layer.part(), k_layer.part(), v_layer.part(),
                                         scaled_layer.part()};
  for (const int64_t rows : {1, 3, 11}) ExpectParity(parts, rows);
}

TEST_P(LinearParityTest, JoinedInt4PartsAndManyRows) {
  RandomLinearOptions gate = Int4(96, 520, 128, 0.02);
  RandomLinearOptions up = Int4(72, 520, 128, 0.0);
  up.seed = 2;
  const RandomLinear gate_layer(gate);
  const RandomLinear up_layer(up);
  const std::vector<LinearPart> parts = {gate_layer.part(), up_layer.part()};
  for (const int64_t rows : {1, 8, 9, 16, 24, 32, 33, 64, 65, 130}) ExpectParity(parts, rows);
}

TEST_P(LinearParityTest, AFullColumnAndAFullMatrixOfOutliers) {
  ExpectParity(Int4(20, 300, 32, 1.0), 3);
}

TEST_P(LinearParityTest, ToleranceRefusesAWrongZeroPointAndAMissingOutlier) {
  RandomLinear layer(Int4(16, 512, 128, 0.01));
  LinearPart part = layer.part();
  const std::unique_ptr<LinearWeight> weight = Pack({&part, 1});
  const std::vector<float> x = RoundToAct(RandomFloats(512, 1.0f, 3));
  const std::vector<float> y = RunLinear(*weight, x);

  part.outliers = nullptr;
  const ReferenceProduct without = MultiplyReference(MakeReferenceLinear({&part, 1}), x, 1);
  EXPECT_FALSE(AllWithin(y, without.y, Tolerance(without, 512)));

  part = layer.part();
  layer.int4().zeros[2] =
      static_cast<uint8_t>(layer.int4().zeros[2] == 0 ? 1 : layer.int4().zeros[2] - 1);
  const ReferenceProduct shifted = MultiplyReference(MakeReferenceLinear({&part, 1}), x, 1);
  EXPECT_FALSE(AllWithin(y, shifted.y, Tolerance(shifted, 512)));
}

TEST_P(LinearParityTest, ErrorsAreThoseOfRoundingAsAWhole) {
  const RandomLinear layer(Int4(64, 2048, 128, 0.01));
  const LinearPart part = layer.part();
  const std::vector<float> x = RoundToAct(RandomFloats(8 * 2048, 1.0f, 3));
  const ReferenceProduct expected = MultiplyReference(MakeReferenceLinear({&part, 1}), x, 8);
  const std::unique_ptr<LinearWeight> weight = Pack({&part, 1});
  // A weight that is rounded to BF16 is off by less than a third of the roundoff, squared.
  EXPECT_TRUE(NmseBelow(RunLinear(*weight, x), expected.y, acts_are_float() ? 1e-12 : 5e-6));
}

FQ_INSTANTIATE_PARITY(LinearParityTest);

}  // namespace
}  // namespace flashquant
