// Checkpoint: a Hugging Face style folder (config.json, generation_config.json,
// model*.safetensors), opened and checked, tensors not yet read. The same struct comes out of the
// GGUF importer (gguf_reader.h).
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/checkpoint/tensor_source.h"
#include "nlohmann/json.hpp"

namespace flashquant {

struct Checkpoint {
  std::string path;                  // folder or file, as given
  nlohmann::json config;             // config.json, an object
  nlohmann::json generation_config;  // an object, empty when the file is missing
  std::unique_ptr<TensorSource> tensors;
};

// NOT_FOUND for a missing folder, file or shard; PERMISSION_DENIED; DATA_LOSS "‹file›: ‹section›:
// ‹what› (limit ‹x›, got ‹y›)" for anything malformed; UNIMPLEMENTED for another format (GGUF,
// pickle, ONNX) by magic, for GGUF with the advice to run `flashquant quantize`. Checks all
// headers, reads no tensor.
absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& dir);

}  // namespace flashquant
