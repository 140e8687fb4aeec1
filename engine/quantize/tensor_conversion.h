// Tensors of a checkpoint that are converted piece by piece and never held whole: 8-bit tables,
// BF16, plain copies; and the check that all weights pass.
#pragma once

#include <span>
#include <string>

#include "absl/status/status.h"
#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/checkpoint/tensor_source.h"
#include "engine/quantize/quantize_plan.h"

namespace flashquant {

// DATA_LOSS for a weight of the rows of `k` that is not finite or above kMaxWeightMagnitude.
absl::Status CheckWeights(const std::string& name, std::span<const float> weights, int64_t k,
                          int num_threads);

// Write the tensor `source` as `planned` says, whose action it is. Errors: those of CheckWeights,
// the source and the writer.
absl::Status WriteInt8(const TensorSource& tensors, const TensorInfo& source,
                       const PlannedTensor& planned, int num_threads, CheckpointWriter* writer);
absl::Status WriteBFloat16(const TensorSource& tensors, const TensorInfo& source,
                           const PlannedTensor& planned, int num_threads, CheckpointWriter* writer);
absl::Status WriteCopy(const TensorSource& tensors, const TensorInfo& source,
                       const PlannedTensor& planned, CheckpointWriter* writer);

}  // namespace flashquant
