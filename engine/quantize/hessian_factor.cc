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

std::vector<int32_t> PlaceColumns(std::span<const double> diagonal, int64_t group_size) {
  const int64_t k = static_cast<int64_t>(diagonal.size());
  const int64_t num_groups = CeilDiv(k, group_size);
  std::vector<double> mean(static_cast<size_t>(num_groups), 0.0);
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t end = std::min(k, (group + 1) * group_size);
    for (int64_t i = group * group_size; i < end; ++i) {
      mean[static_cast<size_t>(group)] +=
          diagonal[static_cast<size_t>(i)] / static_cast<double>(end - group * group_size);
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
    return diagonal[static_cast<size_t>(a)] > diagonal[static_cast<size_t>(b)];
  });
  std::reverse(order.begin(), order.end());
  return order;
}

// By column, from the factor's diagonal by place.
void SetCosts(std::span<const double> pivots, ColumnCosts* costs) {
  costs->cost.resize(pivots.size());
  costs->importance.resize(pivots.size());
  for (size_t p = 0; p < pivots.size(); ++p) {
    costs->cost[static_cast<size_t>(costs->column_at[p])] = pivots[p] * pivots[p];
  }
  const size_t group_size = static_cast<size_t>(costs->group_size);
  for (size_t begin = 0; begin < pivots.size(); begin += group_size) {
    const size_t end = std::min(pivots.size(), begin + group_size);
    const double largest =
        *std::max_element(costs->cost.begin() + static_cast<std::ptrdiff_t>(begin),
                          costs->cost.begin() + static_cast<std::ptrdiff_t>(end));
    costs->group_cost.push_back(largest);
    for (size_t i = begin; i < end; ++i) {
      costs->importance[i] = static_cast<float>(costs->cost[i] / largest);
    }
  }
}

// Order, damping and costs; `attempt` factors with the order and damping that `costs` has by then.
using Attempt = std::function<absl::StatusOr<std::optional<std::vector<double>>>(double)>;
absl::Status FindFactor(std::span<const double> diagonal, const HessianFactorOptions& options,
                        const Attempt& attempt, ColumnCosts* costs) {
  costs->k = static_cast<int64_t>(diagonal.size());
  costs->group_size = options.group_size;
  costs->column_at = PlaceColumns(diagonal, options.group_size);
  double mean = 0;
  for (const double value : diagonal) mean += value / static_cast<double>(costs->k);
  if (mean == 0) mean = 1;
  costs->damping = std::max(options.damping, 1e-8) * mean;
  for (int step = 0; step <= kMaxDampingSteps; ++step) {
    FQ_ASSIGN_OR_RETURN(const std::optional<std::vector<double>> pivots,
                        attempt(kLeastPivot * mean));
    if (pivots.has_value()) {
      SetCosts(*pivots, costs);
      return absl::OkStatus();
    }
    costs->damping *= 10;
  }
  return InternalError("calibration: Hessian cannot be factored");
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

std::optional<std::vector<double>> TryFactor(const Hessian& hessian, double least_pivot,
                                             int num_threads, HessianFactor* factor) {
  const size_t size = factor->column_at.size();
  std::vector<double> matrix(size * size);
  factor->hessian.resize(size * size);
  for (size_t p = 0; p < size; ++p) {
    for (size_t q = p; q < size; ++q) {
      matrix[p * size + q] = hessian.at(factor->column_at[p], factor->column_at[q]);
    }
    matrix[p * size + p] += factor->damping;
    for (size_t q = p; q < size; ++q) {
      factor->hessian[p * size + q] = static_cast<float>(matrix[p * size + q]);
      factor->hessian[q * size + p] = factor->hessian[p * size + q];
    }
  }
  if (!CholeskyUpper(hessian.k(), least_pivot, num_threads, &matrix)) return std::nullopt;
  factor->propagation.assign(size * size, 0.0f);
  std::vector<double> pivots(size);
  for (size_t p = 0; p < size; ++p) {
    pivots[p] = matrix[p * size + p];
    for (size_t q = p; q < size; ++q) {
      factor->propagation[p * size + q] = static_cast<float>(matrix[p * size + q] / pivots[p]);
    }
  }
  return pivots;
}

absl::StatusOr<HessianFactor> FactorHessian(const Hessian& hessian,
                                            const HessianFactorOptions& options) {
  if (!hessian.IsFinite()) return InternalError("calibration: a layer's inputs are not finite");
  std::vector<double> diagonal;
  for (int64_t i = 0; i < hessian.k(); ++i) diagonal.push_back(hessian.at(i, i));
  HessianFactor factor;
  const Attempt attempt = [&](double least_pivot) {
    return TryFactor(hessian, least_pivot, options.num_threads, &factor);
  };
  FQ_RETURN_IF_ERROR(FindFactor(diagonal, options, attempt, &factor));
  return factor;
}

absl::StatusOr<ColumnCosts> FactorInputs(QuantizerOps* ops, const HessianFactorOptions& options) {
  FQ_ASSIGN_OR_RETURN(const std::vector<double> diagonal, ops->InputDiagonal());
  ColumnCosts costs;
  const Attempt attempt = [&](double least_pivot) {
    return ops->Factor(costs.column_at, costs.damping, least_pivot);
  };
  FQ_RETURN_IF_ERROR(FindFactor(diagonal, options, attempt, &costs));
  return costs;
}

}  // namespace flashquant
