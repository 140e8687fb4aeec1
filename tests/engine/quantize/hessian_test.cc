// Products, Hessians and their factors against naive double-precision versions, and against the
// inverse-Hessian form of GPTQ that the factor replaces.
#include "engine/quantize/hessian.h"

#include <cmath>
#include <random>

#include "engine/quantize/hessian_factor.h"
#include "engine/quantize/matrix_multiply.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

std::vector<float> RandomValues(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// Rows with a common part, so that columns are correlated.
std::vector<float> CorrelatedRows(int64_t rows, int64_t k, uint32_t seed) {
  std::vector<float> values = RandomValues(rows * k, seed);
  const std::vector<float> common = RandomValues(rows, seed + 1);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      float& value = values[static_cast<size_t>(row * k + i)];
      value =
          (value + common[static_cast<size_t>(row)]) * (1.0f + 0.05f * static_cast<float>(i % 11));
    }
  }
  return values;
}

struct Sizes {
  int64_t m, n, inner;
};

TEST(MatrixMultiplyTest, AgreesWithThreeLoopsForAllSizesAndStrides) {
  for (const Sizes& s : {Sizes{1, 1, 1}, Sizes{4, 32, 256}, Sizes{5, 33, 257}, Sizes{3, 600, 7},
                         Sizes{17, 31, 513}, Sizes{64, 16, 100}}) {
    const std::vector<float> a = RandomValues(s.m * s.inner, 1);
    const std::vector<float> b = RandomValues(s.inner * s.n, 2);
    for (const bool transposed : {false, true}) {
      const int64_t row_stride = transposed ? 1 : s.inner;
      const int64_t column_stride = transposed ? s.m : 1;
      std::vector<float> c(static_cast<size_t>(s.m * s.n), 1.0f);
      MultiplyAdd(s.m, s.n, s.inner, -2.0f, {a.data(), row_stride, column_stride}, b.data(), s.n,
                  c.data(), s.n);
      const std::vector<double> a_double(a.begin(), a.end());
      const std::vector<double> b_double(b.begin(), b.end());
      std::vector<double> c_double(c.size(), 1.0);
      MultiplyAdd(s.m, s.n, s.inner, -2.0, {a_double.data(), row_stride, column_stride},
                  b_double.data(), s.n, c_double.data(), s.n);
      for (int64_t i = 0; i < s.m; ++i) {
        for (int64_t j = 0; j < s.n; ++j) {
          double sum = 0;
          for (int64_t p = 0; p < s.inner; ++p) {
            sum += a_double[static_cast<size_t>(i * row_stride + p * column_stride)] *
                   b_double[static_cast<size_t>(p * s.n + j)];
          }
          const double tolerance = std::sqrt(static_cast<double>(s.inner));
          EXPECT_NEAR(c_double[static_cast<size_t>(i * s.n + j)], 1 - 2 * sum,
                      1e-14 * tolerance * 16);
          EXPECT_NEAR(static_cast<double>(c[static_cast<size_t>(i * s.n + j)]), 1 - 2 * sum,
                      1e-6 * tolerance * 8);
        }
      }
    }
  }
}

TEST(HessianTest, IsTheSumOfOuterProductsOverAllCalls) {
  constexpr int64_t kK = 150;
  const std::vector<float> rows = CorrelatedRows(70, kK, 3);
  Hessian hessian(kK);
  hessian.Add(std::span<const float>(rows).subspan(0, 30 * kK), 1);
  hessian.Add(std::span<const float>(rows).subspan(30 * kK), 1);
  EXPECT_EQ(hessian.num_rows(), 70);
  for (int64_t i = 0; i < kK; ++i) {
    for (int64_t j = 0; j < kK; ++j) {
      double sum = 0;
      double magnitude = 0;
      for (int64_t row = 0; row < 70; ++row) {
        const double product = static_cast<double>(rows[static_cast<size_t>(row * kK + i)]) *
                               static_cast<double>(rows[static_cast<size_t>(row * kK + j)]);
        sum += product;
        magnitude += std::fabs(product);
      }
      EXPECT_NEAR(hessian.at(i, j), sum, 1e-6 * magnitude);
      EXPECT_EQ(hessian.at(i, j), hessian.at(j, i));
    }
  }
}

TEST(HessianTest, NumberOfThreadsDoesNotChangeABit) {
  const std::vector<float> rows = CorrelatedRows(64, 300, 4);
  Hessian one(300);
  Hessian many(300);
  one.Add(rows, 1);
  many.Add(rows, 5);
  EXPECT_TRUE(std::equal(one.values().begin(), one.values().end(), many.values().begin()));
  const std::vector<float> errors = RandomValues(9 * 300, 5);
  EXPECT_EQ(one.Energy(errors, 1), one.Energy(errors, 4));
}

TEST(HessianTest, EnergyIsTheSquaredOutput) {
  constexpr int64_t kK = 40;
  const std::vector<float> rows = CorrelatedRows(50, kK, 6);
  Hessian hessian(kK);
  hessian.Add(rows, 1);
  const std::vector<float> errors = RandomValues(3 * kK, 7);
  double squares = 0;
  for (int64_t n = 0; n < 3; ++n) {
    for (int64_t row = 0; row < 50; ++row) {
      double output = 0;
      for (int64_t i = 0; i < kK; ++i) {
        output += static_cast<double>(errors[static_cast<size_t>(n * kK + i)]) *
                  static_cast<double>(rows[static_cast<size_t>(row * kK + i)]);
      }
      squares += output * output;
    }
  }
  EXPECT_NEAR(hessian.Energy(errors, 1), squares, 1e-5 * squares);
}

TEST(HessianFactorTest, CholeskyGivesTheMatrixBack) {
  constexpr int64_t kK = 300;  // more than two blocks
  const std::vector<float> rows = CorrelatedRows(400, kK, 8);
  Hessian hessian(kK);
  hessian.Add(rows, 1);
  std::vector<double> one(hessian.values().begin(), hessian.values().end());
  std::vector<double> many = one;
  ASSERT_TRUE(CholeskyUpper(kK, 0, 1, &one));
  ASSERT_TRUE(CholeskyUpper(kK, 0, 3, &many));
  EXPECT_EQ(one, many);
  for (int64_t i = 0; i < kK; i += 7) {
    for (int64_t j = i; j < kK; ++j) {
      double sum = 0;
      for (int64_t p = 0; p <= i; ++p) {
        sum += one[static_cast<size_t>(p * kK + i)] * one[static_cast<size_t>(p * kK + j)];
      }
      EXPECT_NEAR(sum, hessian.at(i, j), 1e-10 * std::sqrt(hessian.at(i, i) * hessian.at(j, j)));
    }
  }
}

// Inverse of a symmetric positive matrix, by Gauss and Jordan.
std::vector<double> Invert(std::vector<double> matrix, size_t size) {
  std::vector<double> inverse(size * size, 0.0);
  for (size_t i = 0; i < size; ++i) inverse[i * size + i] = 1;
  for (size_t p = 0; p < size; ++p) {
    const double pivot = matrix[p * size + p];
    for (size_t j = 0; j < size; ++j) {
      matrix[p * size + j] /= pivot;
      inverse[p * size + j] /= pivot;
    }
    for (size_t i = 0; i < size; ++i) {
      const double factor = matrix[i * size + p];
      if (i == p || factor == 0) continue;
      for (size_t j = 0; j < size; ++j) {
        matrix[i * size + j] -= factor * matrix[p * size + j];
        inverse[i * size + j] -= factor * inverse[p * size + j];
      }
    }
  }
  return inverse;
}

// The cost of an error in GPTQ's own terms: one over the diagonal of the inverse of the Hessian of
// the columns not yet done.
TEST(HessianFactorTest, CostIsThatOfTheInverseHessianOfWhatIsLeft) {
  constexpr size_t kK = 24;
  const std::vector<float> rows = CorrelatedRows(60, kK, 9);
  Hessian hessian(kK);
  hessian.Add(rows, 1);
  const auto factor = FactorHessian(hessian, {.group_size = 8});
  FQ_ASSERT_OK(factor);
  std::vector<double> left(kK * kK);
  for (size_t p = 0; p < kK; ++p) {
    for (size_t q = 0; q < kK; ++q) {
      left[p * kK + q] = hessian.at(factor->column_at[p], factor->column_at[q]);
    }
    left[p * kK + p] += factor->damping;
  }
  for (size_t place = kK; place-- > 0;) {
    const size_t size = place + 1;  // columns at places 0 .. place are left
    std::vector<double> part(size * size);
    for (size_t p = 0; p < size; ++p) {
      for (size_t q = 0; q < size; ++q) part[p * size + q] = left[p * kK + q];
    }
    const std::vector<double> inverse = Invert(part, size);
    EXPECT_NEAR(
        factor->cost[static_cast<size_t>(factor->column_at[place])] * inverse[place * size + place],
        1.0, 1e-9);
  }
}

TEST(HessianFactorTest, GroupsStayTogetherAndTheLargestInputsComeFirst) {
  constexpr int64_t kK = 40;
  Hessian hessian(kK);
  std::vector<float> row(kK, 0.0f);
  for (int64_t i = 0; i < kK; ++i) {
    std::fill(row.begin(), row.end(), 0.0f);
    // The last, short group has the largest inputs, the first the next ones.
    row[static_cast<size_t>(i)] = (i >= 32  ? 9.0f
                                   : i < 16 ? 5.0f
                                            : 1.0f) +
                                  0.01f * static_cast<float>(i % 7);
    hessian.Add(row, 1);
  }
  const auto factor = FactorHessian(hessian, {.group_size = 16});
  FQ_ASSERT_OK(factor);
  for (int64_t place = 0; place < kK; ++place) {
    const int64_t group = factor->column_at[static_cast<size_t>(place)] / 16;
    EXPECT_EQ(group, place < 16 ? 1 : place < 32 ? 0 : 2) << place;
  }
  for (size_t place = 1; place < 16; ++place) {
    EXPECT_GE(hessian.at(factor->column_at[place], factor->column_at[place]),
              hessian.at(factor->column_at[place - 1], factor->column_at[place - 1]));
  }
}

TEST(HessianFactorTest, DeadColumnsSingularAndEmptyHessiansHaveAFactor) {
  constexpr int64_t kK = 48;
  Hessian none(kK);
  Hessian singular(kK);  // rank 1, with a dead column
  std::vector<float> row = RandomValues(kK, 10);
  row[5] = 0;
  for (int i = 0; i < 3; ++i) singular.Add(row, 1);
  Hessian huge(kK);
  std::vector<float> large(kK, 1e-18f);
  large[7] = 1e15f;
  huge.Add(large, 1);
  for (const Hessian* hessian : {&none, &singular, &huge}) {
    const auto factor = FactorHessian(*hessian, {.group_size = 32});
    FQ_ASSERT_OK(factor);
    for (const double cost : factor->cost) EXPECT_GT(cost, 0);
    for (const float value : factor->propagation) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST(HessianFactorTest, InputsThatAreNotFiniteAreRefused) {
  Hessian hessian(4);
  hessian.Add(std::vector<float>{1, 2, INFINITY, 4}, 1);
  EXPECT_THAT(FactorHessian(hessian, {.group_size = 32}),
              StatusIs(absl::StatusCode::kInternal, testing::HasSubstr("not finite")));
}

}  // namespace
}  // namespace flashquant
