// CudaQuantizerOps::SolveRows: the passes over the columns, a group or at most kMaxPassColumns
// places at a time, and the products between them. By place means [k][stride]
// (quantizer_launchers.h).
#include <algorithm>
#include <numeric>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/cuda_status.h"
#include "kernels/cuda/quantize/cuda_quantizer_ops.h"
#include "kernels/cuda/quantize/device_copies.h"

namespace flashquant::cuda {
namespace {

static_assert(kMarkedCode == kOutlierCode);

// Arrays by place.
enum { kWeights, kErrors, kGradient, kProduct, kChange };

}  // namespace

// Weights and planned outliers by place; everything else cleared.
absl::Status CudaQuantizerOps::LoadRows(const RowsProblem& problem, RowsState* state) {
  const int64_t n = problem.n;
  const int64_t k = problem.k;
  state->n = n;
  state->k = k;
  state->stride = RoundUp<int64_t>(n, kRowTile);
  state->groups_per_row = problem.groups_per_row();
  const int64_t size = k * state->stride;
  for (DeviceBuffer& array : by_place_) {
    FQ_RETURN_IF_ERROR(Reserve(backend_, size * int64_t{sizeof(float)}, &array));
  }
  FQ_RETURN_IF_ERROR(Reserve(backend_, size, &codes_));
  FQ_RETURN_IF_ERROR(Reserve(backend_, size, &mask_));
  FQ_RETURN_IF_ERROR(Reserve(backend_, n * k, &out_codes_));
  state->weights = by_place_[kWeights].As<float>();
  state->errors = by_place_[kErrors].As<float>();
  state->gradient = by_place_[kGradient].As<float>();
  state->codes = codes_.As<uint8_t>();
  state->mask = mask_.As<uint8_t>();
  FQ_RETURN_IF_ERROR(Upload(backend_, problem.params, &params_));
  state->params = params_.As<GroupParams>();
  FQ_RETURN_IF_ERROR(Upload(backend_, problem.weights, &weights_));
  FQ_RETURN_IF_ERROR(ToStatus(LaunchToPlaces(weights_.As<float>(), place_of_column_.As<int32_t>(),
                                             n, k, state->stride, state->weights, stream_),
                              "rows"));
  FQ_RETURN_IF_ERROR(
      ToStatus(cudaMemsetAsync(mask_.data(), 0, static_cast<size_t>(size), stream_), "rows"));
  if (problem.mask.empty()) {
    FQ_RETURN_IF_ERROR(UploadImportance(problem.importance, k, problem.group_size));
    return Upload(backend_, problem.outliers, &outliers_);
  }
  FQ_RETURN_IF_ERROR(Upload(backend_, problem.mask, &out_codes_));
  return ToStatus(LaunchToPlaces(out_codes_.As<uint8_t>(), place_of_column_.As<int32_t>(), n, k,
                                 state->stride, state->mask, stream_),
                  "rows");
}

int64_t CudaQuantizerOps::PassBegin(const RowsProblem& problem, int64_t end) const {
  if (problem.group_size > kMaxPassColumns) return std::max<int64_t>(0, end - kMaxPassColumns);
  const int64_t group = GroupAt(problem, end - 1);
  return end - std::min(problem.group_size, problem.k - group * problem.group_size);
}

// The values of places begin .. end - 1 as the errors of those done before want them, to kChange.
absl::Status CudaQuantizerOps::Compensate(const RowsState& state, int64_t begin, int64_t end) {
  float* const values = by_place_[kChange].As<float>();
  const int64_t count = end - begin;
  FQ_RETURN_IF_ERROR(
      ToStatus(cudaMemcpyAsync(values, state.weights + begin * state.stride,
                               static_cast<size_t>(count * state.stride) * sizeof(float),
                               cudaMemcpyDeviceToDevice, stream_),
               "compensation"));
  if (end == state.k) return absl::OkStatus();
  return products_->Multiply(
      state.stride, count, state.k - end, 1.0f, {state.errors + end * state.stride, state.stride},
      {propagation_.As<float>() + begin * state.k + end, state.k}, 1.0f, {values, state.stride});
}

absl::Status CudaQuantizerOps::FitGroup(const RowsProblem& problem, const RowsState& state,
                                        int64_t begin, int64_t end) {
  const int64_t group = GroupAt(problem, begin);
  const int64_t first_column = group * problem.group_size;
  FitArguments fit;
  fit.values = by_place_[kChange].As<float>();
  fit.n = state.n;
  fit.stride = state.stride;
  fit.group_size = static_cast<int32_t>(problem.group_size);
  fit.count = static_cast<int32_t>(end - begin);
  fit.symmetric = problem.symmetric;
  fit.importance = importance_.As<float>() + first_column;
  fit.peak = peaks_host_[static_cast<size_t>(group)];
  fit.place_of = place_of_column_.As<int32_t>() + first_column;
  fit.begin = static_cast<int32_t>(begin);
  fit.outliers = outliers_.As<int32_t>() + group;
  fit.params = state.params + group;
  fit.groups_per_row = state.groups_per_row;
  fit.mask = state.mask;
  return ToStatus(LaunchFitGroup(fit, stream_), "group fit");
}

absl::Status CudaQuantizerOps::FirstPass(const RowsProblem& problem, const RowsState& state) {
  for (int64_t end = state.k; end > 0;) {
    const int64_t begin = PassBegin(problem, end);
    FQ_RETURN_IF_ERROR(Compensate(state, begin, end));
    if (problem.mask.empty()) FQ_RETURN_IF_ERROR(FitGroup(problem, state, begin, end));
    FQ_RETURN_IF_ERROR(ToStatus(
        LaunchColumnPass(state, static_cast<int32_t>(begin), static_cast<int32_t>(end - begin),
                         static_cast<int32_t>(GroupAt(problem, begin)), propagation_.As<float>(),
                         by_place_[kChange].As<float>(), stream_),
        "column pass"));
    end = begin;
  }
  return absl::OkStatus();
}

absl::Status CudaQuantizerOps::TimesHessian(const RowsState& state, const float* values,
                                            float* product) {
  return products_->Multiply(state.stride, state.k, state.k, 1.0f, {values, state.stride},
                             {hessian_.As<float>(), state.k}, 0.0f, {product, state.stride});
}

// One sweep of the descent: each group's scale and columns, and what that does to the gradient.
absl::Status CudaQuantizerOps::Sweep(const RowsProblem& problem, const RowsState& state) {
  float* const change = by_place_[kChange].As<float>();
  const bool refit_in_pass = problem.group_size <= kMaxPassColumns;
  if (!refit_in_pass) {
    float* const product = by_place_[kProduct].As<float>();
    FQ_RETURN_IF_ERROR(ToStatus(LaunchLevels(state, change, stream_), "levels"));
    FQ_RETURN_IF_ERROR(TimesHessian(state, change, product));
    FQ_RETURN_IF_ERROR(ToStatus(LaunchRefitRows(state, product, change, stream_), "refit"));
    FQ_RETURN_IF_ERROR(products_->Multiply(state.stride, state.k, state.k, 1.0f,
                                           {change, state.stride}, {hessian_.As<float>(), state.k},
                                           1.0f, {state.gradient, state.stride}));
  }
  for (int64_t end = state.k; end > 0;) {
    const int64_t begin = PassBegin(problem, end);
    const int64_t count = end - begin;
    FQ_RETURN_IF_ERROR(
        ToStatus(LaunchDescent(state, static_cast<int32_t>(begin), static_cast<int32_t>(count),
                               static_cast<int32_t>(GroupAt(problem, begin)), refit_in_pass,
                               hessian_.As<float>(), change, stream_),
                 "descent"));
    // The Hessian is symmetric: its rows are its columns.
    FQ_RETURN_IF_ERROR(products_->Multiply(
        state.stride, state.k, count, 1.0f, {change, state.stride},
        {hessian_.As<float>() + begin, state.k}, 1.0f, {state.gradient, state.stride}));
    end = begin;
  }
  return absl::OkStatus();
}

absl::StatusOr<SolvedRows> CudaQuantizerOps::Collect(const RowsProblem& problem,
                                                     const RowsState& state) {
  float* const moved = by_place_[kProduct].As<float>();
  FQ_RETURN_IF_ERROR(TimesHessian(state, state.errors, state.gradient));
  FQ_RETURN_IF_ERROR(TimesHessian(state, state.weights, moved));
  FQ_RETURN_IF_ERROR(Reserve(backend_, 4 * state.stride * int64_t{sizeof(double)}, &small_));
  FQ_RETURN_IF_ERROR(
      ToStatus(LaunchRowSums(state, moved, damping_, small_.As<double>(), stream_), "sums"));
  SolvedRows solved;
  FQ_ASSIGN_OR_RETURN(const std::vector<double> sums,
                      Download<double>(backend_, small_.data(), 4 * state.stride));
  double* const totals[] = {&solved.energy, &solved.error, &solved.output_energy,
                            &solved.output_error};
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t row = 0; row < state.n; ++row) {
      *totals[i] += sums[static_cast<size_t>(i * state.stride + row)];
    }
  }
  FQ_ASSIGN_OR_RETURN(
      solved.params,
      Download<GroupParams>(backend_, params_.data(), static_cast<int64_t>(problem.params.size())));
  FQ_RETURN_IF_ERROR(CollectCodes(state, &solved));
  return solved;
}

absl::Status CudaQuantizerOps::CollectCodes(const RowsState& state, SolvedRows* solved) {
  auto* const codes = out_codes_.As<uint8_t>();
  const auto* const values = weights_.As<float>();
  FQ_RETURN_IF_ERROR(ToStatus(
      LaunchToColumns(state, place_of_column_.As<int32_t>(), codes, weights_.As<float>(), stream_),
      "rows"));
  FQ_RETURN_IF_ERROR(Reserve(backend_, state.n * int64_t{sizeof(int64_t)}, &small_));
  FQ_RETURN_IF_ERROR(ToStatus(LaunchOutliers(codes, values, state.n, state.k, small_.As<int32_t>(),
                                             nullptr, nullptr, stream_),
                              "outliers"));
  FQ_ASSIGN_OR_RETURN(const std::vector<int32_t> counts,
                      Download<int32_t>(backend_, small_.data(), state.n));
  std::vector<int64_t> first(counts.size(), 0);
  std::exclusive_scan(counts.begin(), counts.end(), first.begin(), int64_t{0});
  const int64_t total = first.back() + counts.back();
  if (total > 0) {
    FQ_RETURN_IF_ERROR(Upload(backend_, std::span<const int64_t>(first), &small_));
    FQ_RETURN_IF_ERROR(Reserve(backend_, total * int64_t{sizeof(BFloat16)}, &outlier_values_));
    FQ_RETURN_IF_ERROR(
        ToStatus(LaunchOutliers(codes, values, state.n, state.k, nullptr, small_.As<int64_t>(),
                                outlier_values_.As<BFloat16>(), stream_),
                 "outliers"));
    FQ_ASSIGN_OR_RETURN(solved->outliers,
                        Download<BFloat16>(backend_, outlier_values_.data(), total));
  }
  FQ_ASSIGN_OR_RETURN(solved->codes, Download<uint8_t>(backend_, codes, state.n * state.k));
  return absl::OkStatus();
}

absl::StatusOr<SolvedRows> CudaQuantizerOps::SolveRows(const RowsProblem& problem) {
  if (problem.k != static_cast<int64_t>(column_at_.size())) {
    return InternalError("factor of {} columns for {} columns", column_at_.size(), problem.k);
  }
  if (problem.group_size > kMaxPassColumns && problem.mask.empty()) {
    return InternalError("groups of {} need planned outliers", problem.group_size);
  }
  RowsState state;
  FQ_RETURN_IF_ERROR(LoadRows(problem, &state));
  FQ_RETURN_IF_ERROR(FirstPass(problem, state));
  if (problem.descent_sweeps > 0) {
    FQ_RETURN_IF_ERROR(TimesHessian(state, state.errors, state.gradient));
  }
  for (int sweep = 0; sweep < problem.descent_sweeps; ++sweep) {
    FQ_RETURN_IF_ERROR(Sweep(problem, state));
  }
  return Collect(problem, state);
}

}  // namespace flashquant::cuda
