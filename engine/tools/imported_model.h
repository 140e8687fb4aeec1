// Models for the off-line commands: what the server reads, and besides it the formats that are for
// import only (GGUF files, GPTQ folders), whose weights are dequantized when they are loaded.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/model/loaded_model.h"
#include "engine/tokenizer/tokenizer.h"
#include "kernels/backend_factory.h"

namespace flashquant {

// Of a folder or of a GGUF file. NOT_FOUND when it has none.
absl::StatusOr<std::unique_ptr<Tokenizer>> TokenizerOf(const std::string& path);

// LoadModel for any of them, without progress.
absl::StatusOr<LoadedModel> LoadAnyModel(const std::string& path, int32_t context_length,
                                         const BackendOptions& backend_options);

}  // namespace flashquant
