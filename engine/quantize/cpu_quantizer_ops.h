// CpuQuantizerOps: QuantizerOps on the CPU, of the functions of this folder. Its inputs are FP32 in
// host memory.
#pragma once

#include "engine/quantize/hessian.h"
#include "engine/quantize/hessian_factor.h"
#include "kernels/quantizer_ops.h"

namespace flashquant {

// Results do not depend on num_threads.
class CpuQuantizerOps : public QuantizerOps {
 public:
  explicit CpuQuantizerOps(int num_threads) : num_threads_(num_threads) {}
  // With inputs that have been added already.
  CpuQuantizerOps(Hessian inputs, int num_threads)
      : num_threads_(num_threads), inputs_(std::move(inputs)) {}

  std::string name() const override { return "cpu"; }
  absl::Status BeginInputs(int64_t k) override;
  absl::Status AddInputs(const void* inputs, int64_t num_rows) override;
  int64_t num_columns() const override { return inputs_.k(); }
  absl::StatusOr<bool> InputsAreFinite() override { return inputs_.IsFinite(); }
  absl::StatusOr<std::vector<double>> InputDiagonal() override;
  absl::StatusOr<std::vector<double>> InputMoments() override;
  absl::StatusOr<double> OutputEnergy(std::span<const float> errors) override;
  absl::StatusOr<std::optional<std::vector<double>>> Factor(std::span<const int32_t> column_at,
                                                            double damping,
                                                            double least_pivot) override;
  absl::StatusOr<GroupCurves> Curves(const CurveProblem& problem) override;
  absl::StatusOr<SolvedRows> SolveRows(const RowsProblem& problem) override;

 private:
  const int num_threads_;
  Hessian inputs_;
  HessianFactor factor_;
};

}  // namespace flashquant
