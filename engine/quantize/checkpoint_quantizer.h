// Quantizes a whole checkpoint: reads it tensor by tensor, writes the folder of the design's
// "Checkpoint folder", reports the error per layer.
//
// Memory: one tensor at a time (its FP32 weights, twice that in search state and the packed
// result), beside the weights of the next, which are read meanwhile, and the result of the one
// before, which is written; tables are converted in pieces. The output is the same byte for byte
// for any number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/quantize/calibration.h"
#include "engine/quantize/quantize_plan.h"
#include "engine/quantize/quantize_report.h"

namespace flashquant {

// Called on the calling thread when a tensor has been written, and before the first with done 0.
using QuantizeProgress =
    std::function<void(int64_t done_weights, int64_t total_weights, const std::string& tensor)>;
// Writes `output_dir` (tensors, config.json with quantization_config, tokenizer, chat template,
// generation_config.json, licence files, report), which appears whole or not at all
// (CheckpointWriter); an existing non-empty one is refused with INVALID_ARGUMENT unless
// options.overwrite, which replaces a model folder once the new one is complete. Errors: those of
// MakeQuantizePlan, TensorSource and CheckpointWriter; DATA_LOSS for a weight that is not finite or
// beyond 1e15.
// `calibration` of the same checkpoint: needed by options.method kGptq (INVALID_ARGUMENT without);
// with round to nearest it only adds output errors to the report.
absl::StatusOr<QuantizeReport> QuantizeCheckpoint(const Checkpoint& checkpoint,
                                                  const std::string& output_dir,
                                                  const QuantizeOptions& options,
                                                  const QuantizeProgress& progress,
                                                  Calibration* calibration = nullptr);

// Added to the output's name: the folder with the finished layers of a run that has not ended. A
// run with the same input, options and calibration goes on from it; it is removed at the end.
inline constexpr char kJournalSuffix[] = ".flashquant-layers";

// Name of the JSON report in the output.
inline constexpr char kReportFileName[] = "quantize_report.json";

}  // namespace flashquant
