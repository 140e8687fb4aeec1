// The factor of a damped Hessian in the order in which GPTQ quantizes the columns.
//
// Source: Frantar et al., "GPTQ" (2022); Deviation: instead of the inverse's Cholesky factor we use
// H = R R^T with R upper triangular in processing order, which gives the same updates (as Chee et
// al., "QuIP", show) from one factorization and without an inverse. With the weights' errors so far
// e_b, column a is quantized at v_a = w_a + sum over b done before of e_b * R[b, a] / R[a, a], and
// an error of v_a costs its square times R[a, a]^2: the reciprocal of the diagonal of the inverse
// Hessian of what is left.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/quantize/hessian.h"
#include "kernels/quantizer_ops.h"

namespace flashquant {

struct HessianFactorOptions {
  int64_t group_size =
      128;                // columns of a group stay together in the order; a group of k may be last
  double damping = 0.01;  // of the diagonal's mean, added to the diagonal
  int num_threads = 1;    // does not change the result
};

// "Place" p is the reverse of the processing order: the column at place k - 1 is done first. So the
// columns done before place p are those at p + 1 .. k - 1, one contiguous range.
//
// What a factor says of the columns.
struct ColumnCosts {
  int64_t k = 0;
  int64_t group_size = 0;
  std::vector<int32_t> column_at;  // [k] place -> column
  std::vector<double> cost;        // [k] by column: R[a, a]^2
  std::vector<double> group_cost;  // [groups] the largest cost in the group
  std::vector<float> importance;   // [k] by column: cost over group_cost
  double damping = 0;              // what was added to the diagonal
};

struct HessianFactor : ColumnCosts {
  // [k, k] by place: row p holds R[q, p] / R[p, p] at q > p, 1 at p, 0 before.
  std::vector<float> propagation;
  std::vector<float> hessian;  // [k, k] by place, damped
};

// Groups by falling mean of their diagonal, and columns inside a group likewise, ties to the lower
// one: the inputs that matter most are quantized while there is most to compensate with. Damping is
// raised tenfold until the factorization succeeds, so dead columns and singular Hessians are fine;
// all zeros are as the identity. INTERNAL for values that are not finite.
absl::StatusOr<HessianFactor> FactorHessian(const Hessian& hessian,
                                            const HessianFactorOptions& options);

// The same of the inputs that `ops` holds; the factor stays there.
absl::StatusOr<ColumnCosts> FactorInputs(QuantizerOps* ops, const HessianFactorOptions& options);

// One attempt, for QuantizerOps::Factor: fills in factor->propagation and factor->hessian for its
// order and damping, and returns the diagonal by place.
std::optional<std::vector<double>> TryFactor(const Hessian& hessian, double least_pivot,
                                             int num_threads, HessianFactor* factor);

// In place: upper triangular s with s^T s = the symmetric matrix [k, k] whose upper half `matrix`
// holds. False when a pivot is not above `least_pivot`. The lower half is left as it is.
bool CholeskyUpper(int64_t k, double least_pivot, int num_threads, std::vector<double>* matrix);

}  // namespace flashquant
