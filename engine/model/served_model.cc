#include "engine/model/served_model.h"

#include <algorithm>
#include <utility>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// A folder without tokenizer files still answers requests made of token ids.
absl::Status AttachTokenizer(ServedModel* served) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = LoadTokenizer(served->path);
  if (absl::IsNotFound(tokenizer.status())) return absl::OkStatus();
  if (!tokenizer.ok()) return tokenizer.status();
  // Embedding tables are often padded to more rows than there are tokens; fewer rows is a broken
  // checkpoint.
  if ((*tokenizer)->vocab_size() > served->config.vocab_size) {
    return DataLossError("tokenizer: {} tokens do not fit the embedding table (limit {}, got {})",
                         served->path, served->config.vocab_size, (*tokenizer)->vocab_size());
  }
  served->tokenizer = *std::move(tokenizer);
  if (served->defaults.eos_token_ids.empty() && served->tokenizer->eos().has_value()) {
    served->defaults.eos_token_ids.push_back(*served->tokenizer->eos());
  }
  return absl::OkStatus();
}

absl::Status ResolveContext(const ModelConfig& config, EngineConfig* engine) {
  if (engine->context_length == 0) engine->context_length = config.max_position;
  if (engine->context_length > config.max_position) {
    return FailedPreconditionError("context_length: above the model's context (limit {}, got {})",
                                   config.max_position, engine->context_length);
  }
  return absl::OkStatus();
}

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

}  // namespace

absl::StatusOr<ServedModel> LoadServedModel(const ServedModelOptions& options) {
  ServedModel served;
  served.path = options.path;
  served.engine = options.engine;
  FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(options.path));
  FQ_ASSIGN_OR_RETURN(served.config, ParseModelConfig(checkpoint));
  FQ_ASSIGN_OR_RETURN(served.defaults, ParseGenerationDefaults(checkpoint, served.config));
  FQ_RETURN_IF_ERROR(AttachTokenizer(&served));
  FQ_RETURN_IF_ERROR(ResolveContext(served.config, &served.engine));
  FQ_ASSIGN_OR_RETURN(served.backend, CreateBackend(options.backend));
  served.engine.row_multiple = served.backend->info().row_multiple;

  FQ_ASSIGN_OR_RETURN(served.model,
                      DecoderModel::Load(checkpoint, served.config, served.engine.context_length,
                                         served.backend.get(), options.progress));
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
                                               .eos_token_ids = served.defaults.eos_token_ids}));
  return served;
}

}  // namespace flashquant
