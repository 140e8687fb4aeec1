// Quantizes the layers of a model one after the other by the chosen method, with calibration when
// there is one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "engine/quantize/calibration.h"
#include "engine/quantize/hessian_factor.h"
#include "engine/quantize/matrix_quantizer.h"
#include "engine/quantize/quantize_plan.h"
#include "engine/quantize/quantized_matrix.h"

namespace flashquant {

class LayerQuantizer final {
 public:
  // calibration: null for round to nearest. All arguments outlive the object.
  LayerQuantizer(const QuantizeOptions& options, int64_t group_size, int32_t tile_k,
                 Calibration* calibration)
      : options_(options), group_size_(group_size), tile_k_(tile_k), calibration_(calibration) {}

  // weights: [n, k] of `layer`, checked. With calibration, layers come in the order of
  // Calibration::layers; a layer that is not among them is rounded to nearest. DATA_LOSS when the
  // layer's calibration inputs are not finite.
  absl::StatusOr<QuantizedMatrix> Quantize(const std::string& layer, std::span<const float> weights,
                                           int64_t n, int64_t k);

  // Takes `result` as what Quantize gave for the layer.
  absl::Status UseResult(const std::string& layer, const QuantizedMatrix& result);

  // Whether the calibration reaches the layer.
  bool IsCalibrated(const std::string& layer) const;

 private:
  absl::StatusOr<QuantizedMatrix> QuantizeCalibrated(const std::string& layer,
                                                     std::span<const float> weights, int64_t n,
                                                     int64_t k);
  MatrixQuantizerOptions MatrixOptions() const;

  const QuantizeOptions& options_;
  const int64_t group_size_;
  const int32_t tile_k_;
  Calibration* const calibration_;
  int64_t factor_id_ = -1;
  HessianFactor factor_;  // of the input factor_id_
};

}  // namespace flashquant
