#include "engine/quantize/layer_quantizer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/quantize/gptq_import.h"
#include "engine/quantize/gptq_quantizer.h"
#include "engine/quantize/group_plan.h"
#include "engine/quantize/stage_clock.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/tile_coo.h"

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

MatrixQuantizerOptions LayerQuantizer::MatrixOptions(const std::string& layer, int64_t n,
                                                     int64_t k) const {
  MatrixQuantizerOptions options;
  options.group_size = group_size_;
  options.symmetric = options_.symmetric;
  options.density = options_.density;
  if (const auto found = records_.find(layer); found != records_.end()) {
    // The half keeps RecordBudget from rounding a whole number of records down.
    options.density = (static_cast<double>(found->second * kSlotsPerRecord) + 0.5) /
                      (static_cast<double>(n) * static_cast<double>(k));
  }
  options.rule = options_.rule;
  options.tile_k = tile_k_;
  options.num_threads = options_.num_threads;
  options.descent_sweeps = options_.descent_sweeps;
  return options;
}

void LayerQuantizer::SetLeastBenefit(std::span<const float> weights, int64_t n, int64_t k,
                                     std::span<const double> cost,
                                     MatrixQuantizerOptions* options) const {
  if (options_.threshold > 0) {
    options->least_benefit = options_.threshold * MeanCostOfSpread(weights, n, k, cost);
  }
}

absl::StatusOr<QuantizedMatrix> LayerQuantizer::Quantize(const std::string& layer,
                                                         std::span<const float> weights, int64_t n,
                                                         int64_t k) {
  if (IsImported(layer)) return Import(layer, weights, n, k);
  if (IsCalibrated(layer)) return QuantizeCalibrated(layer, weights, n, k);
  const StageClock clock(&seconds_.layers);
  MatrixQuantizerOptions options = MatrixOptions(layer, n, k);
  SetLeastBenefit(weights, n, k, {}, &options);
  return QuantizeMatrix(ops_, weights, n, k, options);
}

absl::StatusOr<LayerCurve> LayerQuantizer::Measure(const std::string& layer,
                                                   std::span<const float> weights, int64_t n,
                                                   int64_t k) {
  MatrixQuantizerOptions options = MatrixOptions(layer, n, k);
  LayerCurve curve;
  curve.layer = layer;
  for (const double density : MeasuredDensities()) {
    options.density = density;
    curve.records.push_back(RecordBudget(n, k, options));
  }
  ColumnImportance importance;
  double energy = 0;
  QuantizerOps* ops = ops_;
  if (IsCalibrated(layer) && options_.method == QuantizeMethod::kGptq) {
    FQ_ASSIGN_OR_RETURN(const Calibration::Inputs inputs, InputsOf(layer, k));
    ops = inputs.ops;
    FQ_RETURN_IF_ERROR(LoadCosts(inputs));
    importance = {.within_group = costs_.importance, .of_group = costs_.group_cost};
    FQ_ASSIGN_OR_RETURN(energy, ops->OutputEnergy(weights));
  } else {
    for (const float weight : weights) {
      energy += static_cast<double>(weight) * static_cast<double>(weight);
    }
  }
  FQ_ASSIGN_OR_RETURN(GroupCurves curves,
                      ops->Curves(MakeCurveProblem(weights, n, k, options, importance)));
  curve.error = ErrorsWithRecords(n, k, options, importance, std::move(curves), curve.records);
  for (double& error : curve.error) error = energy > 0 ? error / energy : 0;
  return curve;
}

absl::Status LayerQuantizer::UseResult(const std::string& layer, const QuantizedMatrix& result) {
  if (!IsCalibrated(layer)) return absl::OkStatus();
  const StageClock clock(&seconds_.results);
  return calibration_->SetQuantized(layer, Dequantize(result, options_.num_threads));
}

absl::StatusOr<Calibration::Inputs> LayerQuantizer::InputsOf(const std::string& layer, int64_t k) {
  const StageClock clock(&seconds_.calibration);
  FQ_ASSIGN_OR_RETURN(const Calibration::Inputs inputs, calibration_->InputsOf(layer));
  if (inputs.ops->num_columns() != k) {
    return InternalError("calibration: {} inputs for {} columns", inputs.ops->num_columns(), k);
  }
  FQ_ASSIGN_OR_RETURN(const bool are_finite, inputs.ops->InputsAreFinite());
  if (!are_finite) {
    return DataLossError("the layer's inputs on the calibration text are not finite");
  }
  return inputs;
}

HessianFactorOptions LayerQuantizer::FactorOptions(int64_t k) const {
  return {.group_size = group_size_ == -1 ? RoundUp<int64_t>(k, 2) : group_size_,
          .damping = options_.damping,
          .num_threads = options_.num_threads};
}

absl::Status LayerQuantizer::LoadCosts(const Calibration::Inputs& inputs) {
  if (costs_id_ == inputs.id) return absl::OkStatus();
  const StageClock clock(&seconds_.factors);
  costs_id_ = -1;
  FQ_ASSIGN_OR_RETURN(costs_, FactorInputs(inputs.ops, FactorOptions(inputs.ops->num_columns())));
  costs_id_ = inputs.id;
  return absl::OkStatus();
}

absl::Status LayerQuantizer::LoadFactor(const Calibration::Inputs& inputs) {
  if (factor_id_ == inputs.id) return absl::OkStatus();
  const StageClock clock(&seconds_.factors);
  factor_id_ = -1;
  FQ_ASSIGN_OR_RETURN(std::vector<double> moments, inputs.ops->InputMoments());
  const Hessian hessian(inputs.ops->num_columns(), std::move(moments));
  FQ_ASSIGN_OR_RETURN(factor_, FactorHessian(hessian, FactorOptions(hessian.k())));
  factor_id_ = inputs.id;
  return absl::OkStatus();
}

absl::Status LayerQuantizer::MeasureOutput(QuantizerOps* ops, std::span<const float> weights,
                                           QuantizedMatrix* result) const {
  std::vector<float> errors = Dequantize(*result, options_.num_threads);
  std::transform(weights.begin(), weights.end(), errors.begin(), errors.begin(),
                 [](float weight, float value) { return weight - value; });
  FQ_ASSIGN_OR_RETURN(result->output_error, ops->OutputEnergy(errors));
  FQ_ASSIGN_OR_RETURN(result->output_energy, ops->OutputEnergy(weights));
  return absl::OkStatus();
}

absl::StatusOr<QuantizedMatrix> LayerQuantizer::QuantizeCalibrated(const std::string& layer,
                                                                   std::span<const float> weights,
                                                                   int64_t n, int64_t k) {
  FQ_ASSIGN_OR_RETURN(const Calibration::Inputs inputs, InputsOf(layer, k));
  MatrixQuantizerOptions options = MatrixOptions(layer, n, k);
  QuantizedMatrix result;
  if (options_.method == QuantizeMethod::kGptq) {
    FQ_RETURN_IF_ERROR(LoadCosts(inputs));
    const StageClock clock(&seconds_.layers);
    SetLeastBenefit(weights, n, k, costs_.cost, &options);
    FQ_ASSIGN_OR_RETURN(result, QuantizeMatrixGptq(inputs.ops, weights, n, costs_, options));
  } else {
    const StageClock clock(&seconds_.layers);
    SetLeastBenefit(weights, n, k, {}, &options);
    FQ_ASSIGN_OR_RETURN(result, QuantizeMatrix(inputs.ops, weights, n, k, options));
    FQ_RETURN_IF_ERROR(MeasureOutput(inputs.ops, weights, &result));
  }
  FQ_RETURN_IF_ERROR(UseResult(layer, result));
  return result;
}

absl::StatusOr<QuantizedMatrix> LayerQuantizer::Import(const std::string& layer,
                                                       std::span<const float> weights, int64_t n,
                                                       int64_t k) {
  FQ_ASSIGN_OR_RETURN(const GptqLayer codes, options_.imported->ReadLayer(layer));
  if (codes.n != n || codes.k != k) {
    return DataLossError("the codes are of a [{}, {}] matrix (need [{}, {}])", codes.n, codes.k, n,
                         k);
  }
  MatrixQuantizerOptions options = MatrixOptions(layer, n, k);
  const bool is_calibrated = IsCalibrated(layer);
  Calibration::Inputs inputs;
  if (is_calibrated) {
    FQ_ASSIGN_OR_RETURN(inputs, InputsOf(layer, k));
    if (has_original_) FQ_RETURN_IF_ERROR(LoadFactor(inputs));
  }
  const HessianFactor* const factor = is_calibrated && has_original_ ? &factor_ : nullptr;
  SetLeastBenefit(
      weights, n, k,
      factor != nullptr ? std::span<const double>(factor->cost) : std::span<const double>(),
      &options);
  FQ_ASSIGN_OR_RETURN(ImportedMatrix imported,
                      ImportGptqLayer(codes, weights, has_original_, factor, options));
  largest_import_change_ = std::max(largest_import_change_, imported.largest_change);
  if (is_calibrated) {
    FQ_RETURN_IF_ERROR(MeasureOutput(inputs.ops, weights, &imported.matrix));
    FQ_RETURN_IF_ERROR(UseResult(layer, imported.matrix));
  }
  return std::move(imported.matrix);
}

}  // namespace flashquant
