// By place, R R^T becomes the ordinary S^T S (S[p, q] = R of places q, p), so one upper Cholesky
// factorization does it.
#include "engine/quantize/hessian_factor.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/quantize/matrix_multiply.h"
#include "engine/quantize/parallel_for.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kBlock = 128;
constexpr int kMaxDampingSteps = 8;
// Of the damped diagonal's mean: below this a pivot is rounding noise.
constexpr double kLeastPivot = 1e-10;

// The rows first .. last of the factor, right of the diagonal block too.
bool FactorRows(int64_t k, int64_t first, int64_t last, double least_pivot, int num_threads,
                double* matrix) {
  for (int64_t i = first; i < last; ++i) {
    double* row = matrix + i * k;
    for (int64_t q = first; q < i; ++q) {
      const double factor = matrix[q * k + i];
      for (int64_t j = i; j < last; ++j) row[j] -= factor * matrix[q * k + j];
    }
    if (!(row[i] > least_pivot)) return false;
    const double root = std::sqrt(row[i]);
    row[i] = root;
    for (int64_t j = i + 1; j < last; ++j) row[j] /= root;
  }
  const int64_t tiles = CeilDiv(k - last, kBlock);
  ParallelFor(num_threads, tiles, 1, [&](int64_t tile, int64_t) {
    const int64_t begin = last + tile * kBlock;
    const int64_t end = std::min(k, begin + kBlock);
    for (int64_t i = first; i < last; ++i) {
      double* row = matrix + i * k;
      for (int64_t q = first; q < i; ++q) {
        const double factor = matrix[q * k + i];
        for (int64_t j = begin; j < end; ++j) row[j] -= factor * matrix[q * k + j];
      }
      const double inverse = 1.0 / row[i];
      for (int64_t j = begin; j < end; ++j) row[j] *= inverse;
    }
  });
  return true;
}

std::vector<int32_t> PlaceColumns(const Hessian& hessian, int64_t group_size) {
  const int64_t k = hessian.k();
  const int64_t num_groups = CeilDiv(k, group_size);
  std::vector<double> mean(static_cast<size_t>(num_groups), 0.0);
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t end = std::min(k, (group + 1) * group_size);
    for (int64_t i = group * group_size; i < end; ++i) {
      mean[static_cast<size_t>(group)] +=
          hessian.at(i, i) / static_cast<double>(end - group * group_size);
    }
  }
  std::vector<int32_t> order(static_cast<size_t>(k));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const size_t group_a = static_cast<size_t>(a / group_size);
    const size_t group_b = static_cast<size_t>(b / group_size);
    if (group_a != group_b) {
      return mean[group_a] != mean[group_b] ? mean[group_a] > mean[group_b] : group_a < group_b;
    }
    return hessian.at(a, a) > hessian.at(b, b);
  });
  std::reverse(order.begin(), order.end());
  return order;
}

}  // namespace

bool CholeskyUpper(int64_t k, double least_pivot, int num_threads, std::vector<double>* matrix) {
  double* data = matrix->data();
  for (int64_t first = 0; first < k; first += kBlock) {
    const int64_t last = std::min(k, first + kBlock);
    if (!FactorRows(k, first, last, least_pivot, num_threads, data)) return false;
    const int64_t tiles = CeilDiv(k - last, kBlock);
    ParallelFor(num_threads, tiles * tiles, 1, [&](int64_t task, int64_t) {
      const int64_t i = last + task / tiles * kBlock;
      const int64_t j = last + task % tiles * kBlock;
      if (j < i) return;
      MultiplyAdd(std::min(kBlock, k - i), std::min(kBlock, k - j), last - first, -1.0,
                  {data + first * k + i, 1, k}, data + first * k + j, k, data + i * k + j, k);
    });
  }
  return true;
}

absl::StatusOr<HessianFactor> FactorHessian(const Hessian& hessian,
                                            const HessianFactorOptions& options) {
  if (!hessian.IsFinite()) return InternalError("calibration: a layer's inputs are not finite");
  const int64_t k = hessian.k();
  const size_t size = static_cast<size_t>(k);
  HessianFactor factor;
  factor.k = k;
  factor.group_size = options.group_size;
  factor.column_at = PlaceColumns(hessian, options.group_size);
  double mean = 0;
  for (int64_t i = 0; i < k; ++i) mean += hessian.at(i, i) / static_cast<double>(k);
  if (mean == 0) mean = 1;

  std::vector<double> matrix;
  factor.damping = std::max(options.damping, 1e-8) * mean;
  for (int step = 0;; ++step) {
    matrix.resize(size * size);
    for (size_t p = 0; p < size; ++p) {
      for (size_t q = p; q < size; ++q) {
        matrix[p * size + q] = hessian.at(factor.column_at[p], factor.column_at[q]);
      }
      matrix[p * size + p] += factor.damping;
    }
    factor.hessian.resize(size * size);
    for (size_t p = 0; p < size; ++p) {
      for (size_t q = p; q < size; ++q) {
        factor.hessian[p * size + q] = static_cast<float>(matrix[p * size + q]);
        factor.hessian[q * size + p] = factor.hessian[p * size + q];
      }
    }
    if (CholeskyUpper(k, kLeastPivot * mean, options.num_threads, &matrix)) break;
    if (step == kMaxDampingSteps) return InternalError("calibration: Hessian cannot be factored");
    factor.damping *= 10;
  }

  factor.cost.resize(size);
  factor.importance.resize(size);
  factor.propagation.assign(size * size, 0.0f);
  for (size_t p = 0; p < size; ++p) {
    const double diagonal = matrix[p * size + p];
    factor.cost[static_cast<size_t>(factor.column_at[p])] = diagonal * diagonal;
    for (size_t q = p; q < size; ++q) {
      factor.propagation[p * size + q] = static_cast<float>(matrix[p * size + q] / diagonal);
    }
  }
  for (size_t begin = 0; begin < size; begin += static_cast<size_t>(options.group_size)) {
    const size_t end = std::min(size, begin + static_cast<size_t>(options.group_size));
    const double largest =
        *std::max_element(factor.cost.begin() + static_cast<std::ptrdiff_t>(begin),
                          factor.cost.begin() + static_cast<std::ptrdiff_t>(end));
    factor.group_cost.push_back(largest);
    for (size_t i = begin; i < end; ++i) {
      factor.importance[i] = static_cast<float>(factor.cost[i] / largest);
    }
  }
  return factor;
}

}  // namespace flashquant
