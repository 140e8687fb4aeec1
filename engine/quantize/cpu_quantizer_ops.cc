#include "engine/quantize/cpu_quantizer_ops.h"

#include "engine/quantize/gptq_quantizer.h"
#include "engine/quantize/group_curves.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

absl::Status CpuQuantizerOps::BeginInputs(int64_t k) {
  inputs_ = Hessian(k);
  return absl::OkStatus();
}

absl::Status CpuQuantizerOps::AddInputs(const void* inputs, int64_t num_rows) {
  inputs_.Add({static_cast<const float*>(inputs), static_cast<size_t>(num_rows * inputs_.k())},
              num_threads_);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> CpuQuantizerOps::InputDiagonal() {
  std::vector<double> diagonal;
  for (int64_t i = 0; i < inputs_.k(); ++i) diagonal.push_back(inputs_.at(i, i));
  return diagonal;
}

absl::StatusOr<std::vector<double>> CpuQuantizerOps::InputMoments() {
  return std::vector<double>(inputs_.values().begin(), inputs_.values().end());
}

absl::StatusOr<double> CpuQuantizerOps::OutputEnergy(std::span<const float> errors) {
  return inputs_.Energy(errors, num_threads_);
}

absl::StatusOr<std::optional<std::vector<double>>> CpuQuantizerOps::Factor(
    std::span<const int32_t> column_at, double damping, double least_pivot) {
  factor_.k = inputs_.k();
  factor_.column_at.assign(column_at.begin(), column_at.end());
  factor_.damping = damping;
  return TryFactor(inputs_, least_pivot, num_threads_, &factor_);
}

absl::StatusOr<GroupCurves> CpuQuantizerOps::Curves(const CurveProblem& problem) {
  return MakeGroupCurves(problem, num_threads_);
}

absl::StatusOr<SolvedRows> CpuQuantizerOps::SolveRows(const RowsProblem& problem) {
  if (problem.k != factor_.k) {
    return InternalError("factor of {} columns for {} columns", factor_.k, problem.k);
  }
  factor_.group_size = problem.group_size;
  factor_.importance.assign(problem.importance.begin(), problem.importance.end());
  return SolveRowsOnCpu(problem, factor_, num_threads_);
}

}  // namespace flashquant
