// ServedModel: everything that answering needs, made from a folder: weights on a backend,
// tokenizer, defaults, and the step runner with its KV pool. The one place that decides how large
// the pool is.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/engine_config.h"
#include "engine/model/loaded_model.h"
#include "engine/model/model_step_runner.h"
#include "kernels/backend_factory.h"

namespace flashquant {

struct ServedModelOptions {
  std::string path;  // checkpoint folder
  BackendOptions backend;
  EngineConfig engine;         // zeros are filled in: context_length, num_blocks, row_multiple
  int64_t kv_cache_bytes = 0;  // size of the KV pool; 0 = what max_sequences full contexts need, at
                               // most a quarter of the free memory
  LoadProgress progress;       // may be null
};

struct ServedModel : LoadedModel {
  std::unique_ptr<StepRunner> runner;
  EngineConfig engine;  // effective
  int64_t kv_cache_bytes = 0;
  double warm_up_seconds = 0;  // KV pool and buffers made, first steps run
};

// Runs one step to warm up. Errors of LoadModel; UNAVAILABLE when the KV pool cannot hold one full
// context, FAILED_PRECONDITION for an engine configuration that Validate refuses, DATA_LOSS when
// the warm-up gives a value that is not finite.
absl::StatusOr<ServedModel> LoadServedModel(const ServedModelOptions& options);

}  // namespace flashquant
