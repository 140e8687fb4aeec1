// A checkpoint of any configuration's shapes with random weights: big models can be planned,
// loaded, served and timed without their weights. The bytes are made when they are read, so that a
// model can also be loaded without being written first.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/quantize/quantize_plan.h"

namespace flashquant {

struct RandomWeightOptions {
  uint64_t seed = 1;
  bool int4 = true;  // linear layers; else BF16, and the embedding and the head too
  // Read: group_size, symmetric, density, embedding, lm_head, num_threads.
  QuantizeOptions quantize;
};

// `path`: a config.json or a folder with one, of which nothing else is read. The checkpoint's path
// is the folder. Weights have a variance of 1 / K, outliers are spread evenly ("residual"
// semantics). Errors: those of reading the file and of ParseModelConfig; INVALID_ARGUMENT for bad
// options.
absl::StatusOr<Checkpoint> MakeRandomCheckpoint(const std::string& path,
                                                const RandomWeightOptions& options);

// Told of bytes written, of all, and of the tensor just done.
using WriteProgress = std::function<void(int64_t, int64_t, const std::string&)>;
// Writes a made checkpoint as a folder, with the tokenizer's files if they are beside the
// configuration. Errors of CheckpointWriter.
absl::Status WriteCheckpoint(const Checkpoint& checkpoint, const std::string& output_dir,
                             const WriteProgress& progress);

}  // namespace flashquant
