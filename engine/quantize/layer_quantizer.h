// Quantizes the layers of a model one after the other by the chosen method, with calibration when
// there is one.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "engine/quantize/calibration.h"
#include "engine/quantize/density_budget.h"
#include "engine/quantize/hessian_factor.h"
#include "engine/quantize/matrix_quantizer.h"
#include "engine/quantize/quantize_plan.h"
#include "engine/quantize/quantize_report.h"
#include "engine/quantize/quantized_matrix.h"

namespace flashquant {

class LayerQuantizer final {
 public:
  // calibration: null for round to nearest. ops: for layers without. All arguments outlive the
  // object. has_original: the weights to come are not options.imported's own.
  LayerQuantizer(const QuantizeOptions& options, int64_t group_size, int32_t tile_k,
                 bool has_original, QuantizerOps* ops, Calibration* calibration)
      : options_(options),
        group_size_(group_size),
        tile_k_(tile_k),
        has_original_(has_original),
        ops_(ops),
        calibration_(calibration) {}

  // weights: [n, k] of `layer`, checked. With calibration, layers come in the order of
  // Calibration::layers; a layer that is not among them is rounded to nearest. DATA_LOSS when the
  // layer's calibration inputs are not finite.
  absl::StatusOr<QuantizedMatrix> Quantize(const std::string& layer, std::span<const float> weights,
                                           int64_t n, int64_t k);

  // Takes `result` as what Quantize gave for the layer.
  absl::Status UseResult(const std::string& layer, const QuantizedMatrix& result);

  // What outliers are worth in the layer at MeasuredDensities. With calibration, layers come in its
  // order; nothing is set in it.
  absl::StatusOr<LayerCurve> Measure(const std::string& layer, std::span<const float> weights,
                                     int64_t n, int64_t k);
  // From now on so many outlier records by layer, in place of options.density.
  void SetRecords(std::map<std::string, int64_t> records) { records_ = std::move(records); }

  // The codes are another checkpoint's (QuantizeOptions::imported).
  bool IsImported(const std::string& layer) const {
    return options_.imported != nullptr && options_.imported->HasContiguousGroups(layer);
  }
  // Of the imported layers so far: ImportedMatrix::largest_change.
  double largest_import_change() const { return largest_import_change_; }
  // Whether the calibration reaches the layer.
  bool IsCalibrated(const std::string& layer) const;
  // calibration, factors, layers and results so far.
  const QuantizeSeconds& seconds() const { return seconds_; }

 private:
  absl::StatusOr<QuantizedMatrix> QuantizeCalibrated(const std::string& layer,
                                                     std::span<const float> weights, int64_t n,
                                                     int64_t k);
  absl::StatusOr<QuantizedMatrix> Import(const std::string& layer, std::span<const float> weights,
                                         int64_t n, int64_t k);
  absl::StatusOr<Calibration::Inputs> InputsOf(const std::string& layer, int64_t k);
  HessianFactorOptions FactorOptions(int64_t k) const;
  // Make costs_, or factor_, that of the inputs.
  absl::Status LoadCosts(const Calibration::Inputs& inputs);
  absl::Status LoadFactor(const Calibration::Inputs& inputs);
  // The output error that the weights' errors make on the calibration text.
  absl::Status MeasureOutput(QuantizerOps* ops, std::span<const float> weights,
                             QuantizedMatrix* result) const;
  // By MeanCostOfSpread, when there is a threshold.
  void SetLeastBenefit(std::span<const float> weights, int64_t n, int64_t k,
                       std::span<const double> cost, MatrixQuantizerOptions* options) const;
  MatrixQuantizerOptions MatrixOptions(const std::string& layer, int64_t n, int64_t k) const;

  const QuantizeOptions& options_;
  const int64_t group_size_;
  const int32_t tile_k_;
  const bool has_original_;
  QuantizerOps* const ops_;
  Calibration* const calibration_;
  std::map<std::string, int64_t> records_;
  double largest_import_change_ = 0;
  int64_t costs_id_ = -1;
  ColumnCosts costs_;  // of the input costs_id_, whose factor the ops have
  int64_t factor_id_ = -1;
  HessianFactor factor_;  // of the input factor_id_, for imported layers
  QuantizeSeconds seconds_;
};

}  // namespace flashquant
