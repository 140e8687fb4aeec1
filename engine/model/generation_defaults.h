// GenerationDefaults: what generation_config.json says about sampling and the end of an answer.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/model/model_config.h"
#include "engine/request.h"

namespace flashquant {

struct GenerationDefaults {
  SamplingParams
      sampling;  // what a request leaves unset; temperature 1, no filter, if the file has none
  std::vector<int32_t>
      eos_token_ids;  // from generation_config.json, else config.json; may be empty
};

// DATA_LOSS naming file and key for a value out of range or an end token outside the vocabulary.
absl::StatusOr<GenerationDefaults> ParseGenerationDefaults(const Checkpoint& checkpoint,
                                                           const ModelConfig& config);

}  // namespace flashquant
