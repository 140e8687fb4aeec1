// config.json and generation_config.json from the metadata of a GGUF file with a Llama model.
// Private to gguf_reader.cc.
#pragma once

#include "absl/status/statusor.h"
#include "engine/checkpoint/gguf_file.h"
#include "nlohmann/json.hpp"

namespace flashquant {

// Ranges are wide ones: the model loader checks what it needs. DATA_LOSS naming the key;
// UNIMPLEMENTED for another architecture or a rotary scaling other than none, linear and llama3.
absl::StatusOr<nlohmann::json> ConfigFromGguf(const GgufFile& gguf);
absl::StatusOr<nlohmann::json> GenerationConfigFromGguf(const GgufFile& gguf);

}  // namespace flashquant
