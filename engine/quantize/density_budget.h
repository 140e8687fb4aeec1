// Shares one byte budget for a whole model out to its layers' outliers (--target-size): the layers
// whose error falls most per byte get them.
//
// A layer's error is its share of the output (or, without calibration, of the weights), as in the
// report, so layers count alike whatever their scale. Source: rate-distortion allocation, as
// outlier_selector.h does inside a layer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/tensor_source.h"
#include "engine/quantize/quantize_plan.h"
#include "kernels/format/tile_coo.h"

namespace flashquant {

// What a layer's error is expected to be with so many outlier records.
struct LayerCurve {
  std::string layer;
  std::vector<int64_t> records;  // rising, from 0
  std::vector<double> error;     // beside them
};

// Densities at which curves are measured, from 0.
std::span<const double> MeasuredDensities();

// Records of every curve: at most `budget` in all and none beyond a curve's last one, for the least
// sum of errors, which are taken as straight lines between the points and convex as a whole. Ties
// go to the earlier curve.
std::vector<int64_t> ShareRecords(std::span<const LayerCurve> curves, int64_t budget);

// Records that fit a model of `target_bytes` of tensors after all that the plan makes of `tensors`
// without outliers, and after the tables that every INT4 layer with outliers has. INVALID_ARGUMENT
// when there is no room for that much.
absl::StatusOr<int64_t> RecordsThatFit(const QuantizePlan& plan, const TensorSource& tensors,
                                       bool symmetric, const TileCooGeometry& geometry,
                                       int64_t target_bytes);

}  // namespace flashquant
