// QuantizerOps: the heavy steps of quantizing one linear layer's weight [n, k] by GPTQ with
// outliers, on the CPU (engine/quantize/cpu_quantizer_ops.h) or on a GPU (kernels/cuda/quantize).
//
// What a step means is said where the CPU does it; here is only what goes in and out. Host memory
// unless marked. The results repeat bit for bit on the same device, and from device to device up to
// the rounding of sums.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/group_params.h"

namespace flashquant {

// The error of every group as a function of how many of its weights are left out as outliers.
struct CurveProblem {
  std::span<const float> weights;  // [n, k] row-major, finite, at most kMaxWeightMagnitude
  int64_t n = 0;
  int64_t k = 0;
  int64_t group_size = 0;  // 32, 64, 128
  bool symmetric = false;
  int64_t length = 1;                    // numbers of left-out weights: 0 .. length - 1
  std::span<const float> importance;     // [k], 0 .. 1: what a squared error counts; empty: 1
  std::span<const double> group_factor;  // [groups per row], on top; empty: 1
  double factor_scale = 1;               // on top of that, in GroupCurves::errors only

  int64_t groups_per_row() const { return (k + group_size - 1) / group_size; }
};
inline constexpr int64_t kMaxCurveLength = 33;

struct GroupCurves {
  std::vector<float> errors;  // [n, groups per row, length]; infinite: cannot leave out so many
  std::vector<GroupParams> params;    // the same: what reaches that error
  std::vector<double> error_without;  // [n, groups per row], none left out
};

// The GPTQ pass over the columns and what follows it.
struct RowsProblem {
  std::span<const float> weights;  // as above
  int64_t n = 0;
  int64_t k = 0;
  int64_t group_size = 0;  // 32, 64, 128, or one group per row: k rounded up to 2
  bool symmetric = false;
  int descent_sweeps = 0;
  std::span<const float> importance;    // [k]
  std::span<const GroupParams> params;  // [n, groups per row] to start from
  // Either how many outliers each group gets [n, groups per row], at most kMaxCurveLength - 1, or,
  // needed for one group per row, which weights are outliers [n, k].
  std::span<const int32_t> outliers;
  std::span<const uint8_t> mask;

  int64_t groups_per_row() const { return (k + group_size - 1) / group_size; }
};

// A code that is none.
inline constexpr uint8_t kOutlierCode = 0xff;

struct SolvedRows {
  std::vector<GroupParams> params;  // [n, groups per row]
  // [n, k]: the code, or kOutlierCode; and the outliers' values by row, then column, which BF16
  // holds.
  std::vector<uint8_t> codes;
  std::vector<BFloat16> outliers;
  double energy = 0;         // sum of squared weights
  double error = 0;          // sum of squared errors
  double output_energy = 0;  // the same of the outputs over the inputs
  double output_error = 0;
};

// One thread. Holds the inputs of one layer and one factor at a time.
class QuantizerOps {
 public:
  virtual ~QuantizerOps() = default;
  QuantizerOps() = default;
  QuantizerOps(const QuantizerOps&) = delete;
  QuantizerOps& operator=(const QuantizerOps&) = delete;

  virtual std::string name() const = 0;  // "cpu" or "cuda"

  // Second moments H = sum of x x^T, forgetting those before. k: 1 to 2^20.
  virtual absl::Status BeginInputs(int64_t k) = 0;
  // Adds rows [num_rows, k] of the backend's activation type in its memory, after what it has
  // queued. How rows are cut into calls shows in the last bits.
  virtual absl::Status AddInputs(const void* inputs, int64_t num_rows) = 0;
  // Columns of the inputs, 0 before BeginInputs.
  virtual int64_t num_columns() const = 0;
  virtual absl::StatusOr<bool> InputsAreFinite() = 0;
  virtual absl::StatusOr<std::vector<double>> InputDiagonal() = 0;  // [k]
  virtual absl::StatusOr<std::vector<double>> InputMoments() = 0;   // [k, k], symmetric
  // Sum over rows of e H e^T for errors [any, k].
  virtual absl::StatusOr<double> OutputEnergy(std::span<const float> errors) = 0;

  // Factors H with `damping` added to its diagonal, rows and columns in the order of `column_at`
  // (place -> column, hessian_factor.h), for SolveRows. Returns the factor's diagonal by place, or
  // nothing when the square of an element is not above `least_pivot`.
  virtual absl::StatusOr<std::optional<std::vector<double>>> Factor(
      std::span<const int32_t> column_at, double damping, double least_pivot) = 0;

  virtual absl::StatusOr<GroupCurves> Curves(const CurveProblem& problem) = 0;
  // After Factor of inputs with as many columns, whose order keeps groups of problem.group_size
  // together.
  virtual absl::StatusOr<SolvedRows> SolveRows(const RowsProblem& problem) = 0;
};

}  // namespace flashquant
