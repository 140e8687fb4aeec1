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
#include "engine/model/memory_plan.h"
#include "engine/model/model_step_runner.h"
#include "kernels/backend_factory.h"

namespace flashquant {

struct ServedModelOptions {
  std::string path;  // checkpoint folder
  BackendOptions backend;
  EngineConfig engine;         // zeros are filled in: context_length, num_blocks, row_multiple
  int64_t kv_cache_bytes = 0;  // size of the KV pool; 0 = what max_sequences full contexts need, at
                               // most what is left (CPU: a quarter of the free memory)
  double gpu_memory_fraction = 0.9;  // as MemoryBudget has them
  int64_t gpu_reserve_bytes = 0;
  LoadProgress progress;  // may be null
};

struct ServedModel : LoadedModel {
  std::unique_ptr<StepRunner> runner;
  EngineConfig engine;  // effective
  int64_t kv_cache_bytes = 0;
  MemoryPlan plan;              // of a GPU; zeros on the CPU
  int64_t taken_gpu_bytes = 0;  // of the plan and the pool, as measured
  double self_check_seconds = 0;
  double warm_up_seconds = 0;  // KV pool and buffers made, first steps run
};

// On a GPU, nothing is read or allocated before the memory plan fits, and every kind of layer is
// checked against the host (self_check.h) before it is used. Runs steps to warm up. Errors of
// LoadModel and of the self-check; UNAVAILABLE when the model, its KV pool or one full context does
// not fit, FAILED_PRECONDITION for an engine configuration that Validate refuses, DATA_LOSS when
// the warm-up gives a value that is not finite.
absl::StatusOr<ServedModel> LoadServedModel(const ServedModelOptions& options);

}  // namespace flashquant
