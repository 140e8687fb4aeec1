// CudaQuantizerOps: QuantizerOps on one NVIDIA GPU, in order with its backend's ops on the same
// stream. Inputs are BF16 and multiplied exactly; products of one call are summed in FP32, calls in
// FP64. The factor is FP64, the passes FP32.
//
// Device memory, for K columns and N rows: 28 bytes x K^2 and about 30 bytes x K x N at the most.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "kernels/backend.h"
#include "kernels/cuda/quantize/cublas_products.h"
#include "kernels/cuda/quantize/quantizer_launchers.h"
#include "kernels/quantizer_ops.h"

namespace flashquant::cuda {

class CudaQuantizerOps final : public QuantizerOps {
 public:
  // `backend`: a CudaBackend, `stream` its stream; both outlive the object. UNAVAILABLE when cuBLAS
  // is not installed.
  static absl::StatusOr<std::unique_ptr<CudaQuantizerOps>> Create(Backend* backend,
                                                                  cudaStream_t stream);

  std::string name() const override { return "cuda"; }
  absl::Status BeginInputs(int64_t k) override;
  absl::Status AddInputs(const void* inputs, int64_t num_rows) override;
  int64_t num_columns() const override { return input_k_; }
  absl::StatusOr<bool> InputsAreFinite() override;
  absl::StatusOr<std::vector<double>> InputDiagonal() override;
  absl::StatusOr<std::vector<double>> InputMoments() override;
  absl::StatusOr<double> OutputEnergy(std::span<const float> errors) override;
  absl::StatusOr<std::optional<std::vector<double>>> Factor(std::span<const int32_t> column_at,
                                                            double damping,
                                                            double least_pivot) override;
  absl::StatusOr<GroupCurves> Curves(const CurveProblem& problem) override;
  absl::StatusOr<SolvedRows> SolveRows(const RowsProblem& problem) override;

 private:
  CudaQuantizerOps(Backend* backend, cudaStream_t stream) : backend_(backend), stream_(stream) {}

  absl::Status Inspect();
  absl::Status FactorBlocks(double least_pivot);
  absl::Status UploadImportance(std::span<const float> importance, int64_t k, int64_t group_size);

  // The steps of SolveRows.
  absl::Status LoadRows(const RowsProblem& problem, RowsState* state);
  absl::Status Compensate(const RowsState& state, int64_t begin, int64_t end);
  absl::Status FitGroup(const RowsProblem& problem, const RowsState& state, int64_t begin,
                        int64_t end);
  absl::Status FirstPass(const RowsProblem& problem, const RowsState& state);
  // gradient, or another such array, = damped Hessian times `values`, by place.
  absl::Status TimesHessian(const RowsState& state, const float* values, float* product);
  absl::Status Sweep(const RowsProblem& problem, const RowsState& state);
  absl::StatusOr<SolvedRows> Collect(const RowsProblem& problem, const RowsState& state);
  absl::Status CollectCodes(const RowsState& state, SolvedRows* solved);
  // First of the places up to `end` that one pass takes: of one group.
  int64_t PassBegin(const RowsProblem& problem, int64_t end) const;
  int64_t GroupAt(const RowsProblem& problem, int64_t place) const {
    return column_at_[static_cast<size_t>(place)] / problem.group_size;
  }

  Backend* const backend_;
  const cudaStream_t stream_;
  std::unique_ptr<CublasProducts> products_;

  // Inputs.
  int64_t input_k_ = 0;
  DeviceBuffer moments_;  // [k, k] FP64; the upper half is right
  DeviceBuffer product_;  // [k, k] FP32
  bool inspected_ = false;
  bool finite_ = false;
  std::vector<double> diagonal_;

  // The factor.
  std::vector<int32_t> column_at_;
  std::vector<int32_t> place_of_;  // by column
  double damping_ = 0;
  DeviceBuffer place_of_column_;  // place_of_
  DeviceBuffer matrix_;           // [k, k] FP64
  DeviceBuffer hessian_;          // [k, k] FP32 by place, damped
  DeviceBuffer propagation_;      // [k, k] FP32 by place
  DeviceBuffer panel_;            // FP64: rows of the factor right of a block
  DeviceBuffer inverse_;          // FP64: of a diagonal block

  DeviceBuffer small_;       // flags, orders, per-row and per-column arrays
  DeviceBuffer weights_;     // [n, k] FP32
  DeviceBuffer importance_;  // [k] FP32
  DeviceBuffer peaks_;       // [groups per row] FP32
  std::vector<float> peaks_host_;
  DeviceBuffer factors_;      // [groups per row] FP64
  DeviceBuffer params_;       // [n, groups per row], or of curves
  DeviceBuffer errors_;       // curves; by place
  DeviceBuffer without_;      // [n, groups per row] FP64
  DeviceBuffer outliers_;     // [n, groups per row] int32
  DeviceBuffer by_place_[5];  // weights, errors, gradient, another product, change
  DeviceBuffer codes_;
  DeviceBuffer mask_;
  DeviceBuffer out_codes_;  // by column; before, the given mask
  DeviceBuffer outlier_values_;
};

}  // namespace flashquant::cuda
