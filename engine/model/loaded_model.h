// LoadedModel: a checkpoint folder brought onto a backend: configuration, tokenizer, defaults,
// weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/checkpoint/quantized_tensors.h"
#include "engine/model/decoder_model.h"
#include "engine/model/generation_defaults.h"
#include "engine/tokenizer/chat_format.h"
#include "engine/tokenizer/tokenizer.h"
#include "kernels/backend.h"
#include "kernels/backend_factory.h"

namespace flashquant {

// Members are destroyed in reverse order: the backend outlives what was allocated from it.
struct LoadedModel {
  std::string path;
  ModelConfig config;
  GenerationDefaults defaults;
  int32_t context_length = 0;            // positions that the model was loaded for
  std::unique_ptr<Tokenizer> tokenizer;  // null when the folder has none: token ids only
  // Layout of chat prompts; nullopt without a tokenizer or for a template that we do not know. Its
  // end-of-turn tokens are in defaults.eos_token_ids.
  std::optional<ChatFormat> chat_format;
  std::string chat_refusal;  // what the template is and what is supported, when it is not known
  std::unique_ptr<Backend> backend;
  std::unique_ptr<DecoderModel> model;
  WeightBytes weight_bytes;  // of the checkpoint
};

// Decides whether what is known before anything is read, that is all but `model`, may be loaded.
using LoadCheck = std::function<absl::Status(const LoadedModel& loaded)>;

// context_length 0 = the model's own. Errors of OpenCheckpoint, ParseModelConfig, LoadTokenizer and
// of the backend; DATA_LOSS when the tokenizer does not fit the vocabulary, FAILED_PRECONDITION for
// a context longer than the model's, UNAVAILABLE when the weights do not fit the free memory.
absl::StatusOr<LoadedModel> LoadModel(const std::string& path, int32_t context_length,
                                      const BackendOptions& backend_options,
                                      const LoadProgress& progress);
// The same for an open checkpoint, whose path is where the tokenizer is looked for. `check`:
// asked besides; of a device with memory of its own, instead of the rule that the weights fit it.
absl::StatusOr<LoadedModel> LoadModel(const Checkpoint& checkpoint, int32_t context_length,
                                      const BackendOptions& backend_options,
                                      const LoadProgress& progress,
                                      const LoadCheck& check = nullptr);

}  // namespace flashquant
