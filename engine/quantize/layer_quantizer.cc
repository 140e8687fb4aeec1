#include "engine/quantize/layer_quantizer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/quantize/gptq_quantizer.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// SpQR's measure for its threshold: what it would cost, on average, to replace a weight by its
// column's mean.
double MeanCostOfSpread(std::span<const float> weights, int64_t n, int64_t k,
                        std::span<const double> cost) {
  double sum = 0;
  for (int64_t column = 0; column < k; ++column) {
    double total = 0;
    double squares = 0;
    for (int64_t row = 0; row < n; ++row) {
      const double weight = static_cast<double>(weights[static_cast<size_t>(row * k + column)]);
      total += weight;
      squares += weight * weight;
    }
    const double mean = total / static_cast<double>(n);
    const double factor = cost.empty() ? 1.0 : cost[static_cast<size_t>(column)];
    sum += factor * std::max(0.0, squares / static_cast<double>(n) - mean * mean);
  }
  return sum / static_cast<double>(k);
}

}  // namespace

bool LayerQuantizer::IsCalibrated(const std::string& layer) const {
  if (calibration_ == nullptr) return false;
  const std::vector<std::string>& layers = calibration_->layers();
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

MatrixQuantizerOptions LayerQuantizer::MatrixOptions() const {
  MatrixQuantizerOptions options;
  options.group_size = group_size_;
  options.symmetric = options_.symmetric;
  options.density = options_.density;
  options.rule = options_.rule;
  options.tile_k = tile_k_;
  options.num_threads = options_.num_threads;
  options.descent_sweeps = options_.descent_sweeps;
  return options;
}

absl::StatusOr<QuantizedMatrix> LayerQuantizer::Quantize(const std::string& layer,
                                                         std::span<const float> weights, int64_t n,
                                                         int64_t k) {
  if (IsCalibrated(layer)) return QuantizeCalibrated(layer, weights, n, k);
  MatrixQuantizerOptions options = MatrixOptions();
  if (options_.threshold > 0) {
    options.least_benefit = options_.threshold * MeanCostOfSpread(weights, n, k, {});
  }
  return QuantizeMatrix(weights, n, k, options);
}

absl::Status LayerQuantizer::UseResult(const std::string& layer, const QuantizedMatrix& result) {
  if (!IsCalibrated(layer)) return absl::OkStatus();
  return calibration_->SetQuantized(layer, Dequantize(result));
}

absl::StatusOr<QuantizedMatrix> LayerQuantizer::QuantizeCalibrated(const std::string& layer,
                                                                   std::span<const float> weights,
                                                                   int64_t n, int64_t k) {
  FQ_ASSIGN_OR_RETURN(const Calibration::Inputs inputs, calibration_->InputsOf(layer));
  if (inputs.hessian->k() != k) {
    return InternalError("calibration: {} inputs for {} columns", inputs.hessian->k(), k);
  }
  if (!inputs.hessian->IsFinite()) {
    return DataLossError("the layer's inputs on the calibration text are not finite");
  }
  MatrixQuantizerOptions options = MatrixOptions();
  QuantizedMatrix result;
  if (options_.method == QuantizeMethod::kGptq) {
    if (factor_id_ != inputs.id) {
      factor_id_ = -1;
      FQ_ASSIGN_OR_RETURN(factor_,
                          FactorHessian(*inputs.hessian, {.group_size = group_size_,
                                                          .damping = options_.damping,
                                                          .num_threads = options_.num_threads}));
      factor_id_ = inputs.id;
    }
    if (options_.threshold > 0) {
      options.least_benefit = options_.threshold * MeanCostOfSpread(weights, n, k, factor_.cost);
    }
    result = QuantizeMatrixGptq(weights, n, factor_, options);
  } else {
    if (options_.threshold > 0) {
      options.least_benefit = options_.threshold * MeanCostOfSpread(weights, n, k, {});
    }
    result = QuantizeMatrix(weights, n, k, options);
    std::vector<float> errors = Dequantize(result);
    std::transform(weights.begin(), weights.end(), errors.begin(), errors.begin(),
                   [](float weight, float value) { return weight - value; });
    result.output_error = inputs.hessian->Energy(errors, options_.num_threads);
    result.output_energy = inputs.hessian->Energy(weights, options_.num_threads);
  }
  FQ_RETURN_IF_ERROR(calibration_->SetQuantized(layer, Dequantize(result)));
  return result;
}

}  // namespace flashquant
