#include "engine/model/served_model.h"

#include <algorithm>
#include <span>
#include <utility>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/paged_kv.h"

namespace flashquant {
namespace {

// Blocks for max_sequences full contexts, unless that is more than `kv_cache_bytes` or, when that
// is 0, than a quarter of the free memory: the rest is for weights, activations and everybody else.
absl::Status ResolveKvPool(const ServedModelOptions& options, ServedModel* served) {
  EngineConfig& engine = served->engine;
  const BackendInfo info = served->backend->info();
  const PagedKvGeometry geometry = {.num_layers = served->config.num_layers,
                                    .block_tokens = engine.block_tokens,
                                    .num_kv_heads = served->config.num_kv_heads,
                                    .head_dim = served->config.head_dim};
  const int64_t block_bytes = KvCache::BlockBytes(geometry, info.kv_dtype);
  const int64_t blocks_per_context = CeilDiv(engine.context_length, engine.block_tokens);
  if (engine.num_blocks == 0) {
    const int64_t wanted = blocks_per_context * engine.max_sequences + 1;
    const int64_t pool_bytes =
        options.kv_cache_bytes > 0 ? options.kv_cache_bytes : info.free_memory_bytes / 4;
    engine.num_blocks =
        static_cast<int32_t>(std::min({wanted, pool_bytes / block_bytes, int64_t{1} << 30}));
  }
  if (engine.num_blocks - 1 < blocks_per_context) {
    return UnavailableError(
        "KV pool: {} blocks, one request needs {}; raise --kv-cache-bytes or lower "
        "--context-length (limit {} MiB, one context needs {} MiB)",
        std::max(engine.num_blocks - 1, 0), blocks_per_context,
        (engine.num_blocks * block_bytes) >> 20, ((blocks_per_context + 1) * block_bytes) >> 20);
  }
  served->kv_cache_bytes = engine.num_blocks * block_bytes;
  return absl::OkStatus();
}

// One decode step of each number of rows, most rows first: weights that make no finite numbers are
// found out before the first request is, that request finds warm memory, and a backend that records
// steps does so now. Each sequence has one token; they all write block 1, which is never read.
absl::Status WarmUp(const EngineConfig& engine, bool all_sizes, StepRunner* runner) {
  const int32_t token_id = 0;
  const int32_t block_id = kNullBlock + 1;
  const SamplingParams sampling = {.temperature = 0.0f};
  const StopConditions stop;
  const SequenceStep sequence = {.token_ids = std::span(&token_id, 1),
                                 .block_ids = std::span(&block_id, 1),
                                 .samples = true,
                                 .sampling = &sampling,
                                 .stop = &stop};
  const int32_t most = all_sizes ? RoundUp(engine.max_sequences, engine.row_multiple) : 1;
  for (int32_t rows = most; rows > 0; rows -= engine.row_multiple) {
    StepPlan plan;
    plan.num_tokens = std::min(rows, engine.max_sequences);
    plan.num_rows = RoundUp(plan.num_tokens, engine.row_multiple);
    plan.sequences.assign(static_cast<size_t>(plan.num_tokens), sequence);
    FQ_RETURN_IF_ERROR(Annotate(runner->Launch(plan), "warm-up"));
    FQ_ASSIGN_OR_RETURN(const StepResult result, runner->Collect());
    if (result.tokens.empty() || result.tokens.front().non_finite) {
      return DataLossError("warm-up: non-finite output");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ServedModel> LoadServedModel(const ServedModelOptions& options) {
  FQ_ASSIGN_OR_RETURN(LoadedModel loaded, LoadModel(options.path, options.engine.context_length,
                                                    options.backend, options.progress));
  ServedModel served{std::move(loaded), nullptr, options.engine, 0};
  served.engine.context_length = served.context_length;
  served.engine.row_multiple = served.backend->info().row_multiple;
  const bool records = served.backend->info().records_ops;
  FQ_RETURN_IF_ERROR(ResolveKvPool(options, &served));
  FQ_RETURN_IF_ERROR(served.engine.Validate());
  FQ_ASSIGN_OR_RETURN(served.runner,
                      ModelStepRunner::Create(served.model.get(), served.backend.get(),
                                              {.token_budget = served.engine.token_budget,
                                               .row_multiple = served.engine.row_multiple,
                                               .max_sequences = served.engine.max_sequences,
                                               .context_length = served.engine.context_length,
                                               .block_tokens = served.engine.block_tokens,
                                               .num_blocks = served.engine.num_blocks,
                                               .eos_token_ids = served.defaults.eos_token_ids,
                                               .record_decode = records}));
  FQ_RETURN_IF_ERROR(Annotate(WarmUp(served.engine, records, served.runner.get()), options.path));
  return served;
}

}  // namespace flashquant
