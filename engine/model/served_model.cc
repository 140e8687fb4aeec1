#include "engine/model/served_model.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "engine/base/clock.h"
#include "engine/model/kv_pool.h"
#include "engine/model/self_check.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/paged_kv.h"

namespace flashquant {
namespace {

// Blocks for max_sequences full contexts, unless that is more than `kv_cache_bytes` or, when that
// is 0, than a quarter of the free memory: the rest is for weights, activations and everybody else.
absl::Status ResolveHostPool(const ServedModelOptions& options, const LoadedModel& loaded,
                             EngineConfig* engine) {
  const BackendInfo info = loaded.backend->info();
  const PagedKvGeometry geometry = {.num_layers = loaded.config.num_layers,
                                    .block_tokens = engine->block_tokens,
                                    .num_kv_heads = loaded.config.num_kv_heads,
                                    .head_dim = loaded.config.head_dim};
  const int64_t block_bytes = KvCache::BlockBytes(geometry, info.kv_dtype);
  const int64_t blocks_per_context = CeilDiv(loaded.context_length, engine->block_tokens);
  if (engine->num_blocks == 0) {
    const int64_t wanted = blocks_per_context * engine->max_sequences + 1;
    const int64_t pool_bytes =
        options.kv_cache_bytes > 0 ? options.kv_cache_bytes : info.free_memory_bytes / 4;
    engine->num_blocks =
        static_cast<int32_t>(std::min({wanted, pool_bytes / block_bytes, int64_t{1} << 30}));
  }
  if (engine->num_blocks - 1 < blocks_per_context) {
    return UnavailableError(
        "KV pool: {} blocks, one request needs {}; raise --kv-cache-bytes or lower "
        "--context-length (limit {} MiB, one context needs {} MiB)",
        std::max(engine->num_blocks - 1, 0), blocks_per_context,
        (engine->num_blocks * block_bytes) >> 20, ((blocks_per_context + 1) * block_bytes) >> 20);
  }
  return absl::OkStatus();
}

// Before the first allocation, from the headers alone.
absl::Status ResolveGpuPool(const ServedModelOptions& options, const Checkpoint& checkpoint,
                            const BackendInfo& info, EngineConfig* engine, MemoryPlan* plan) {
  FQ_ASSIGN_OR_RETURN(*plan, MakeMemoryPlan(checkpoint, {.max_sequences = engine->max_sequences,
                                                         .context_length = engine->context_length,
                                                         .token_budget = engine->token_budget,
                                                         .block_tokens = engine->block_tokens,
                                                         .kv_dtype = info.kv_dtype}));
  const MemoryBudget budget = {.total = info.total_memory_bytes,
                               .free = info.free_memory_bytes,
                               .fraction = options.gpu_memory_fraction,
                               .reserve = options.gpu_reserve_bytes};
  FQ_ASSIGN_OR_RETURN(engine->num_blocks, ChooseKvBlocks(*plan, budget,
                                                         {.num_blocks = engine->num_blocks,
                                                          .kv_cache_bytes = options.kv_cache_bytes,
                                                          .max_sequences = engine->max_sequences,
                                                          .block_tokens = engine->block_tokens}));
  return absl::OkStatus();
}

// A step is run and its output looked at: weights that make no finite numbers are found out before
// the first request is.
absl::Status RunWarmUpStep(const StepPlan& plan, StepRunner* runner) {
  FQ_RETURN_IF_ERROR(Annotate(runner->Launch(plan), "warm-up"));
  FQ_ASSIGN_OR_RETURN(const StepResult result, runner->Collect());
  if (result.tokens.empty() || result.tokens.front().non_finite) {
    return DataLossError("warm-up: non-finite output");
  }
  return absl::OkStatus();
}

// One decode step, so that the first request finds warm memory. A backend that records steps does
// that now, for each number of rows, after a step of as many tokens as there may be: memory that
// such a step needs is taken before the recordings, which it would end, and before requests come.
// What is written to blocks 1 and up is never read.
absl::Status WarmUp(const EngineConfig& engine, bool all_sizes, StepRunner* runner) {
  // With logprobs, so that what they need to come back is there before the first request.
  const SamplingParams sampling = {.temperature = 0.0f, .top_logprobs = 0};
  const StopConditions stop;
  const int32_t most_tokens = std::min(
      {engine.token_budget, engine.context_length, (engine.num_blocks - 1) * engine.block_tokens});
  const std::vector<int32_t> tokens(static_cast<size_t>(all_sizes ? most_tokens : 1));
  std::vector<int32_t> blocks(
      static_cast<size_t>(CeilDiv(static_cast<int32_t>(tokens.size()), engine.block_tokens)));
  std::iota(blocks.begin(), blocks.end(), kNullBlock + 1);
  SequenceStep sequence = {.token_ids = tokens,
                           .block_ids = blocks,
                           .samples = true,
                           .sampling = &sampling,
                           .stop = &stop};
  if (all_sizes) {
    StepPlan plan;
    plan.phase = StepPhase::kPrefill;
    plan.num_tokens = most_tokens;
    plan.num_rows = RoundUp(most_tokens, engine.row_multiple);
    plan.sequences = {sequence};
    FQ_RETURN_IF_ERROR(RunWarmUpStep(plan, runner));
  }
  sequence.token_ids = std::span(tokens).first(1);
  sequence.block_ids = std::span(blocks).first(1);
  const int32_t most = all_sizes ? RoundUp(engine.max_sequences, engine.row_multiple) : 1;
  for (int32_t rows = most; rows > 0; rows -= engine.row_multiple) {
    StepPlan plan;
    plan.num_tokens = std::min(rows, engine.max_sequences);
    plan.num_rows = RoundUp(plan.num_tokens, engine.row_multiple);
    plan.sequences.assign(static_cast<size_t>(plan.num_tokens), sequence);
    FQ_RETURN_IF_ERROR(RunWarmUpStep(plan, runner));
  }
  return absl::OkStatus();
}

// Self-check, buffers, first steps.
absl::Status Prepare(const Checkpoint& checkpoint, bool has_own_memory, ServedModel* served) {
  const SteadyClock clock;
  const TimePoint loaded_at = clock.Now();
  const EngineConfig& engine = served->engine;
  const BackendInfo info = served->backend->info();
  if (has_own_memory) {
    FQ_RETURN_IF_ERROR(
        CheckLayers(checkpoint, *served->model, engine.token_budget, served->backend.get()));
    served->self_check_seconds = ToSeconds(clock.Now() - loaded_at);
  }
  const PagedKvGeometry geometry = {.num_layers = served->config.num_layers,
                                    .block_tokens = engine.block_tokens,
                                    .num_kv_heads = served->config.num_kv_heads,
                                    .head_dim = served->config.head_dim};
  served->kv_cache_bytes = engine.num_blocks * KvCache::BlockBytes(geometry, info.kv_dtype);
  const TimePoint warm_up_at = clock.Now();
  FQ_ASSIGN_OR_RETURN(served->runner,
                      ModelStepRunner::Create(served->model.get(), served->backend.get(),
                                              {.token_budget = engine.token_budget,
                                               .row_multiple = engine.row_multiple,
                                               .max_sequences = engine.max_sequences,
                                               .context_length = engine.context_length,
                                               .block_tokens = engine.block_tokens,
                                               .num_blocks = engine.num_blocks,
                                               .eos_token_ids = served->defaults.eos_token_ids,
                                               .record_decode = info.records_ops}));
  FQ_RETURN_IF_ERROR(
      Annotate(WarmUp(engine, info.records_ops, served->runner.get()), served->path));
  served->warm_up_seconds = ToSeconds(clock.Now() - warm_up_at);
  served->taken_gpu_bytes = served->backend->info().taken_memory_bytes;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ServedModel> LoadServedModel(const ServedModelOptions& options) {
  FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(options.path));
  ServedModel served;
  EngineConfig engine = options.engine;
  MemoryPlan plan;
  bool has_own_memory = false;
  const LoadCheck resolve_pool = [&](const LoadedModel& loaded) {
    const BackendInfo info = loaded.backend->info();
    engine.context_length = loaded.context_length;
    engine.row_multiple = engine.deterministic && !info.exact_rows
                              ? RoundUp(engine.max_sequences, info.row_multiple)
                              : info.row_multiple;
    has_own_memory = info.total_memory_bytes > 0;
    return has_own_memory ? ResolveGpuPool(options, checkpoint, info, &engine, &plan)
                          : ResolveHostPool(options, loaded, &engine);
  };
  FQ_ASSIGN_OR_RETURN(static_cast<LoadedModel&>(served),
                      LoadModel(checkpoint, engine.context_length, options.backend,
                                options.progress, resolve_pool));
  served.engine = engine;
  served.plan = plan;
  FQ_RETURN_IF_ERROR(served.engine.Validate());
  FQ_RETURN_IF_ERROR(Prepare(checkpoint, has_own_memory, &served));
  return served;
}

}  // namespace flashquant
