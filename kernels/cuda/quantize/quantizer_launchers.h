// Launchers of the quantizer's kernels, for cuda_quantizer_ops.cc. Pointers are device memory; each
// queues on `stream` and returns the launch error. No absl here: nvcc compiles this header.
//
// Arrays "by place" are [k][stride]: the values of one column of all rows lie side by side, columns
// in the order of the factor (engine/quantize/hessian_factor.h: place k - 1 is quantized first).
// stride: the number of rows, rounded up to kRowTile; rows beyond it are zero.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/format/group_params.h"

namespace flashquant::cuda {

inline constexpr int kRowTile = 32;          // rows of a block of the column passes
inline constexpr int kMaxPassColumns = 128;  // places that a column pass takes at once
inline constexpr int kCholeskyBlock = 64;
inline constexpr uint8_t kMarkedCode = 0xff;  // kOutlierCode of quantizer_ops.h

// ---- group_fit.cu ----------------------------------------------------------------------------

// CurveProblem (quantizer_ops.h) without the host's arrays.
struct CurveArguments {
  const float* weights = nullptr;  // [n, k]
  int64_t n = 0;
  int64_t k = 0;
  int32_t group_size = 0;  // 32, 64, 128
  int32_t length = 0;      // at most 33
  bool symmetric = false;
  const float* importance = nullptr;     // [k] or null
  const float* peak = nullptr;           // [groups per row]: SortedGroup's, for this importance
  const double* group_factor = nullptr;  // [groups per row] or null
  double factor_scale = 1;
  float* errors = nullptr;          // [n, groups per row, length]
  GroupParams* params = nullptr;    // the same
  double* error_without = nullptr;  // [n, groups per row]
};
cudaError_t LaunchGroupCurves(const CurveArguments& arguments, cudaStream_t stream);

// Scale, zero point and outliers of one group of all rows.
struct FitArguments {
  const float* values = nullptr;  // [count][stride], places begin .. begin + count - 1
  int64_t n = 0;
  int64_t stride = 0;
  int32_t group_size = 0;
  int32_t count = 0;  // of the group: group_size, or less for the last
  bool symmetric = false;
  const float* importance = nullptr;  // [count] of the group's columns
  float peak = 0;
  const int32_t* place_of = nullptr;  // [count]: of the group's columns
  int32_t begin = 0;
  const int32_t* outliers = nullptr;  // of row 0's group; rows are groups_per_row apart
  GroupParams* params = nullptr;      // likewise, read and written
  int64_t groups_per_row = 0;
  uint8_t* mask = nullptr;  // by place: 1 is written for the chosen
};
cudaError_t LaunchFitGroup(const FitArguments& arguments, cudaStream_t stream);

// ---- column_pass.cu --------------------------------------------------------------------------

struct RowsState {
  int64_t n = 0;
  int64_t k = 0;
  int64_t stride = 0;
  int64_t groups_per_row = 0;
  float* weights = nullptr;   // by place, as all here but params
  float* errors = nullptr;    // weight - what stands for it
  float* gradient = nullptr;  // damped Hessian times errors
  uint8_t* codes = nullptr;
  uint8_t* mask = nullptr;
  GroupParams* params = nullptr;  // [n, groups per row]
};

// [n, k] by column to by place, and back; place_of: [k] column -> place.
cudaError_t LaunchToPlaces(const float* in, const int32_t* place_of, int64_t n, int64_t k,
                           int64_t stride, float* out, cudaStream_t stream);
cudaError_t LaunchToPlaces(const uint8_t* in, const int32_t* place_of, int64_t n, int64_t k,
                           int64_t stride, uint8_t* out, cudaStream_t stream);
// codes, kMarkedCode at outliers, and values (weights - errors) by column.
cudaError_t LaunchToColumns(const RowsState& state, const int32_t* place_of, uint8_t* codes,
                            float* values, cudaStream_t stream);
// What LaunchToColumns marked, row after row. `first` null: counts[n], how many a row has; else,
// where in `outliers` the row's begin.
cudaError_t LaunchOutliers(const uint8_t* codes, const float* values, int64_t n, int64_t k,
                           int32_t* counts, const int64_t* first, BFloat16* outliers,
                           cudaStream_t stream);

// Quantizes the places begin .. begin + count - 1, of one group, from the last to the first.
// values: [count][stride], compensated for all places done before. propagation: [k, k].
cudaError_t LaunchColumnPass(const RowsState& state, int32_t begin, int32_t count, int32_t group,
                             const float* propagation, const float* values, cudaStream_t stream);

// Coordinate descent over the same places: first, with `refit`, the group's scale. gradient is read
// for these places; change: [count][stride], what became of their errors. hessian: [k, k].
cudaError_t LaunchDescent(const RowsState& state, int32_t begin, int32_t count, int32_t group,
                          bool refit, const float* hessian, float* change, cudaStream_t stream);

// The parts of the refit for one group per row. levels: by place, code - zero point or 0.
cudaError_t LaunchLevels(const RowsState& state, float* levels, cudaStream_t stream);
// product: damped Hessian times levels. Turns levels into the change of the errors, and adds it.
cudaError_t LaunchRefitRows(const RowsState& state, const float* product, float* levels,
                            cudaStream_t stream);

// sums: [4, stride]: of a row's squared weights and errors, and of its squared outputs and output
// errors; `moved`: damped Hessian times weights.
cudaError_t LaunchRowSums(const RowsState& state, const float* moved, double damping, double* sums,
                          cudaStream_t stream);

// ---- input_moments.cu ------------------------------------------------------------------------

// Upper half of moments [k, k] += product [k, k] (symmetric).
cudaError_t LaunchAddProduct(const float* product, int64_t k, double* moments, cudaStream_t stream);
// The lower half from the upper one.
cudaError_t LaunchMirror(int64_t k, double* moments, cudaStream_t stream);
// diagonal: [k]; *bad is set to 1 when the upper half has a value that is not finite.
cudaError_t LaunchInspectMoments(const double* moments, int64_t k, double* diagonal, int32_t* bad,
                                 cudaStream_t stream);
// By place with `damping` on the diagonal: matrix and hessian, both halves.
cudaError_t LaunchPlaceMoments(const double* moments, const int32_t* column_at, int64_t k,
                               double damping, double* matrix, float* hessian, cudaStream_t stream);
// Factors the block of `count` <= kCholeskyBlock places from `begin` on of the upper half of
// matrix [k, k]; inverse: [count, kCholeskyBlock] row-major, of the transposed factor, which is
// lower triangular. *bad is set to 1 at a pivot not above least_pivot.
cudaError_t LaunchCholeskyBlock(double* matrix, int64_t k, int64_t begin, int32_t count,
                                double least_pivot, double* inverse, int32_t* bad,
                                cudaStream_t stream);
// rows [count] of `length` values from `from`, `length` apart, to `to`, `stride` apart.
cudaError_t LaunchCopyRows(const double* from, int32_t count, int64_t length, int64_t stride,
                           double* to, cudaStream_t stream);
// propagation: [k, k], row p of the factor over its diagonal, 0 before; pivots: [k].
cudaError_t LaunchPropagation(const double* matrix, int64_t k, float* propagation, double* pivots,
                              cudaStream_t stream);
cudaError_t LaunchToDouble(const float* from, int64_t count, double* to, cudaStream_t stream);
// sums: [rows], of the products of two arrays [rows, k].
cudaError_t LaunchRowProducts(const double* a, const double* b, int64_t rows, int64_t k,
                              double* sums, cudaStream_t stream);

}  // namespace flashquant::cuda
