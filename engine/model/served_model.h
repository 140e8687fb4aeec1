// ServedModel: everything that answering needs, made from a folder: weights on a backend,
// tokenizer, defaults, and the step runner with its KV pool. The one place that decides how large
// the pool is.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/engine_config.h"
#include "engine/model/decoder_model.h"
#include "engine/model/generation_defaults.h"
#include "engine/model/model_step_runner.h"
#include "engine/tokenizer/tokenizer.h"
#include "kernels/backend.h"
#include "kernels/backend_factory.h"

namespace flashquant {

struct ServedModelOptions {
  std::string path;  // checkpoint folder
  BackendOptions backend;
  EngineConfig engine;         // zeros are filled in: context_length, num_blocks, row_multiple
  int64_t kv_cache_bytes = 0;  // size of the KV pool; 0 = what max_sequences full contexts need, at
                               // most a quarter of the free memory
  LoadProgress progress;  // may be null
};

// Members are destroyed in reverse order: the backend outlives what was allocated from it.
struct ServedModel {
  std::string path;
  ModelConfig config;
  GenerationDefaults defaults;
  std::unique_ptr<Tokenizer> tokenizer;  // null when the folder has no tokenizer: token ids only
  std::unique_ptr<Backend> backend;
  std::unique_ptr<DecoderModel> model;
  std::unique_ptr<StepRunner> runner;
  EngineConfig engine;  // effective
  int64_t kv_cache_bytes = 0;
};

// Errors of OpenCheckpoint, ParseModelConfig, LoadTokenizer and of the backend; DATA_LOSS when the
// tokenizer does not fit the vocabulary, FAILED_PRECONDITION for a context longer than the model's,
// UNAVAILABLE when the KV pool cannot hold one full context.
absl::StatusOr<ServedModel> LoadServedModel(const ServedModelOptions& options);

}  // namespace flashquant
