// Inputs, factor and curves; solve_rows.cc has the rest.
#include "kernels/cuda/quantize/cuda_quantizer_ops.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/cuda_status.h"
#include "kernels/cuda/quantize/device_copies.h"

namespace flashquant::cuda {
namespace {

// Of grids over a matrix' rows.
constexpr int64_t kMaxColumns = 65535;
// Columns of the factor's rest that one product updates: the half of the square that is needed, in
// strips.
constexpr int64_t kTrailingStrip = 2048;
// Rows whose errors are multiplied with the moments at once.
constexpr int64_t kEnergyRows = 1024;

}  // namespace

absl::StatusOr<std::unique_ptr<CudaQuantizerOps>> CudaQuantizerOps::Create(Backend* backend,
                                                                           cudaStream_t stream) {
  std::unique_ptr<CudaQuantizerOps> ops(new CudaQuantizerOps(backend, stream));
  FQ_ASSIGN_OR_RETURN(ops->products_, CublasProducts::Create(backend, stream));
  return ops;
}

absl::Status CudaQuantizerOps::BeginInputs(int64_t k) {
  if (k < 1 || k > kMaxColumns) {
    return UnimplementedError("quantizing on CUDA: {} columns (limit {})", k, kMaxColumns);
  }
  input_k_ = k;
  inspected_ = false;
  FQ_RETURN_IF_ERROR(Reserve(backend_, k * k * int64_t{sizeof(double)}, &moments_));
  FQ_RETURN_IF_ERROR(Reserve(backend_, k * k * int64_t{sizeof(float)}, &product_));
  return ToStatus(
      cudaMemsetAsync(moments_.data(), 0, static_cast<size_t>(k * k) * sizeof(double), stream_),
      "second moments");
}

absl::Status CudaQuantizerOps::AddInputs(const void* inputs, int64_t num_rows) {
  inspected_ = false;
  FQ_RETURN_IF_ERROR(products_->SelfProduct(inputs, num_rows, input_k_, product_.As<float>()));
  return ToStatus(LaunchAddProduct(product_.As<float>(), input_k_, moments_.As<double>(), stream_),
                  "second moments");
}

absl::Status CudaQuantizerOps::Inspect() {
  if (inspected_) return absl::OkStatus();
  const int64_t diagonal_bytes = input_k_ * int64_t{sizeof(double)};
  FQ_RETURN_IF_ERROR(Reserve(backend_, diagonal_bytes + int64_t{sizeof(int32_t)}, &small_));
  auto* const bad = reinterpret_cast<int32_t*>(small_.As<uint8_t>() + diagonal_bytes);
  FQ_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(bad, 0, sizeof(*bad), stream_), "second moments"));
  FQ_RETURN_IF_ERROR(ToStatus(
      LaunchInspectMoments(moments_.As<double>(), input_k_, small_.As<double>(), bad, stream_),
      "second moments"));
  FQ_ASSIGN_OR_RETURN(diagonal_, Download<double>(backend_, small_.data(), input_k_));
  FQ_ASSIGN_OR_RETURN(const std::vector<int32_t> found, Download<int32_t>(backend_, bad, 1));
  finite_ = found[0] == 0;
  inspected_ = true;
  return absl::OkStatus();
}

absl::StatusOr<bool> CudaQuantizerOps::InputsAreFinite() {
  FQ_RETURN_IF_ERROR(Inspect());
  return finite_;
}

absl::StatusOr<std::vector<double>> CudaQuantizerOps::InputDiagonal() {
  FQ_RETURN_IF_ERROR(Inspect());
  return diagonal_;
}

absl::StatusOr<std::vector<double>> CudaQuantizerOps::InputMoments() {
  FQ_RETURN_IF_ERROR(
      ToStatus(LaunchMirror(input_k_, moments_.As<double>(), stream_), "second moments"));
  return Download<double>(backend_, moments_.data(), input_k_ * input_k_);
}

// In FP64, as on the CPU: errors of different sizes may cancel.
absl::StatusOr<double> CudaQuantizerOps::OutputEnergy(std::span<const float> errors) {
  const int64_t k = input_k_;
  const int64_t num_rows = static_cast<int64_t>(errors.size()) / k;
  FQ_RETURN_IF_ERROR(ToStatus(LaunchMirror(k, moments_.As<double>(), stream_), "second moments"));
  DeviceBuffer rows;
  DeviceBuffer products;
  double energy = 0;
  for (int64_t first = 0; first < num_rows; first += kEnergyRows) {
    const int64_t count = std::min(kEnergyRows, num_rows - first);
    FQ_RETURN_IF_ERROR(Upload(
        backend_, errors.subspan(static_cast<size_t>(first * k), static_cast<size_t>(count * k)),
        &weights_));
    FQ_RETURN_IF_ERROR(Reserve(backend_, count * k * int64_t{sizeof(double)}, &rows));
    FQ_RETURN_IF_ERROR(Reserve(backend_, count * k * int64_t{sizeof(double)}, &products));
    FQ_RETURN_IF_ERROR(Reserve(backend_, count * int64_t{sizeof(double)}, &small_));
    FQ_RETURN_IF_ERROR(ToStatus(
        LaunchToDouble(weights_.As<float>(), count * k, rows.As<double>(), stream_), "energy"));
    FQ_RETURN_IF_ERROR(products_->Multiply(k, count, k, 1.0, {moments_.As<double>(), k},
                                           {rows.As<double>(), k}, 0.0,
                                           {products.As<double>(), k}));
    FQ_RETURN_IF_ERROR(ToStatus(LaunchRowProducts(rows.As<double>(), products.As<double>(), count,
                                                  k, small_.As<double>(), stream_),
                                "energy"));
    FQ_ASSIGN_OR_RETURN(const std::vector<double> sums,
                        Download<double>(backend_, small_.data(), count));
    for (const double sum : sums) energy += sum;
  }
  return energy;
}

// The upper factor S of S^T S, block of rows after block of rows. Row-major S is column-major L =
// S^T: with X the inverse of the diagonal block of L, the rest of the block's rows is A X^T in
// cuBLAS' terms, and what is left loses its square.
absl::Status CudaQuantizerOps::FactorBlocks(double least_pivot) {
  const int64_t k = input_k_;
  double* const matrix = matrix_.As<double>();
  auto* const bad = small_.As<int32_t>();
  for (int64_t begin = 0; begin < k; begin += kCholeskyBlock) {
    const int64_t count = std::min<int64_t>(kCholeskyBlock, k - begin);
    FQ_RETURN_IF_ERROR(
        ToStatus(LaunchCholeskyBlock(matrix, k, begin, static_cast<int32_t>(count), least_pivot,
                                     inverse_.As<double>(), bad, stream_),
                 "factor"));
    const int64_t end = begin + count;
    const int64_t left = k - end;
    if (left == 0) break;
    double* const rest = matrix + begin * k + end;
    double* const panel = panel_.As<double>();
    FQ_RETURN_IF_ERROR(products_->Multiply(left, count, count, 1.0, {rest, k},
                                           {inverse_.As<double>(), kCholeskyBlock}, 0.0,
                                           {panel, left}));
    FQ_RETURN_IF_ERROR(ToStatus(
        LaunchCopyRows(panel, static_cast<int32_t>(count), left, k, rest, stream_), "factor"));
    for (int64_t first = 0; first < left; first += kTrailingStrip) {
      const int64_t width = std::min(kTrailingStrip, left - first);
      FQ_RETURN_IF_ERROR(products_->Multiply(left - first, width, count, -1.0,
                                             {panel + first, left}, {panel + first, left, true},
                                             1.0, {matrix + (end + first) * k + end + first, k}));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<std::vector<double>>> CudaQuantizerOps::Factor(
    std::span<const int32_t> column_at, double damping, double least_pivot) {
  const int64_t k = input_k_;
  column_at_.assign(column_at.begin(), column_at.end());
  place_of_.resize(column_at_.size());
  for (size_t place = 0; place < column_at_.size(); ++place) {
    place_of_[static_cast<size_t>(column_at_[place])] = static_cast<int32_t>(place);
  }
  damping_ = damping;
  FQ_RETURN_IF_ERROR(Upload(backend_, std::span<const int32_t>(place_of_), &place_of_column_));
  DeviceBuffer order;
  FQ_RETURN_IF_ERROR(Upload(backend_, column_at, &order));
  constexpr int64_t kDouble = sizeof(double);
  constexpr int64_t kFloat = sizeof(float);
  FQ_RETURN_IF_ERROR(Reserve(backend_, k * k * kDouble, &matrix_));
  FQ_RETURN_IF_ERROR(Reserve(backend_, k * k * kFloat, &hessian_));
  FQ_RETURN_IF_ERROR(Reserve(backend_, k * k * kFloat, &propagation_));
  FQ_RETURN_IF_ERROR(Reserve(backend_, kCholeskyBlock * k * kDouble, &panel_));
  FQ_RETURN_IF_ERROR(Reserve(backend_, kCholeskyBlock * kCholeskyBlock * kDouble, &inverse_));
  FQ_RETURN_IF_ERROR(Reserve(backend_, k * kDouble, &small_));
  FQ_RETURN_IF_ERROR(
      ToStatus(cudaMemsetAsync(small_.data(), 0, sizeof(int32_t), stream_), "factor"));
  FQ_RETURN_IF_ERROR(
      ToStatus(LaunchPlaceMoments(moments_.As<double>(), order.As<int32_t>(), k, damping,
                                  matrix_.As<double>(), hessian_.As<float>(), stream_),
               "factor"));
  FQ_RETURN_IF_ERROR(FactorBlocks(least_pivot));
  FQ_ASSIGN_OR_RETURN(const std::vector<int32_t> bad,
                      Download<int32_t>(backend_, small_.data(), 1));
  if (bad[0] != 0) return std::nullopt;
  FQ_RETURN_IF_ERROR(ToStatus(LaunchPropagation(matrix_.As<double>(), k, propagation_.As<float>(),
                                                small_.As<double>(), stream_),
                              "factor"));
  FQ_ASSIGN_OR_RETURN(std::vector<double> pivots, Download<double>(backend_, small_.data(), k));
  return pivots;
}

absl::StatusOr<GroupCurves> CudaQuantizerOps::Curves(const CurveProblem& problem) {
  const int64_t groups = problem.n * problem.groups_per_row();
  CurveArguments arguments;
  arguments.n = problem.n;
  arguments.k = problem.k;
  arguments.group_size = static_cast<int32_t>(problem.group_size);
  arguments.length = static_cast<int32_t>(problem.length);
  arguments.symmetric = problem.symmetric;
  arguments.factor_scale = problem.factor_scale;
  FQ_RETURN_IF_ERROR(Upload(backend_, problem.weights, &weights_));
  arguments.weights = weights_.As<float>();
  FQ_RETURN_IF_ERROR(UploadImportance(problem.importance, problem.k, problem.group_size));
  if (!problem.importance.empty()) arguments.importance = importance_.As<float>();
  arguments.peak = peaks_.As<float>();
  if (!problem.group_factor.empty()) {
    FQ_RETURN_IF_ERROR(Upload(backend_, problem.group_factor, &factors_));
    arguments.group_factor = factors_.As<double>();
  }
  const int64_t entries = groups * problem.length;
  FQ_RETURN_IF_ERROR(Reserve(backend_, entries * int64_t{sizeof(float)}, &errors_));
  FQ_RETURN_IF_ERROR(Reserve(backend_, entries * int64_t{sizeof(GroupParams)}, &params_));
  FQ_RETURN_IF_ERROR(Reserve(backend_, groups * int64_t{sizeof(double)}, &without_));
  arguments.errors = errors_.As<float>();
  arguments.params = params_.As<GroupParams>();
  arguments.error_without = without_.As<double>();
  FQ_RETURN_IF_ERROR(ToStatus(LaunchGroupCurves(arguments, stream_), "group curves"));
  GroupCurves curves;
  FQ_ASSIGN_OR_RETURN(curves.errors, Download<float>(backend_, errors_.data(), entries));
  FQ_ASSIGN_OR_RETURN(curves.params, Download<GroupParams>(backend_, params_.data(), entries));
  FQ_ASSIGN_OR_RETURN(curves.error_without, Download<double>(backend_, without_.data(), groups));
  return curves;
}

// And what SortedGroup knows of a group's importance: how far its largest error is above their
// mean.
absl::Status CudaQuantizerOps::UploadImportance(std::span<const float> importance, int64_t k,
                                                int64_t group_size) {
  peaks_host_.assign(static_cast<size_t>(CeilDiv(k, group_size)), group_search::kEvenPeak);
  for (size_t group = 0; group < peaks_host_.size() && !importance.empty(); ++group) {
    const size_t begin = group * static_cast<size_t>(group_size);
    const auto part = importance.subspan(
        begin, std::min(static_cast<size_t>(group_size), importance.size() - begin));
    float total = 0;
    for (const float factor : part) total += factor;
    const float share = static_cast<float>(part.size()) / std::max(total, 1e-3f);
    peaks_host_[group] = std::min(group_search::kEvenPeak * share, group_search::kMostPeak);
  }
  if (!importance.empty()) FQ_RETURN_IF_ERROR(Upload(backend_, importance, &importance_));
  return Upload(backend_, std::span<const float>(peaks_host_), &peaks_);
}

}  // namespace flashquant::cuda
