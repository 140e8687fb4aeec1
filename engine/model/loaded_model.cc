#include "engine/model/loaded_model.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/checkpoint/kernel_plans.h"
#include "engine/model/rope_table.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

absl::Status AttachChatFormat(LoadedModel* loaded) {
  FQ_ASSIGN_OR_RETURN(ChatFormat format, ChatFormat::Load(loaded->path, loaded->tokenizer.get()));
  if (!format.supported().ok()) {
    loaded->chat_refusal = std::string(format.supported().message());
    return absl::OkStatus();
  }
  std::vector<int32_t>& end_tokens = loaded->defaults.eos_token_ids;
  for (const int32_t id : format.end_of_turn_ids()) {
    if (std::find(end_tokens.begin(), end_tokens.end(), id) == end_tokens.end()) {
      end_tokens.push_back(id);
    }
  }
  loaded->chat_format = std::move(format);
  return absl::OkStatus();
}

// A folder without tokenizer files still answers requests made of token ids.
absl::Status AttachTokenizer(LoadedModel* loaded) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = LoadTokenizer(loaded->path);
  if (absl::IsNotFound(tokenizer.status())) return absl::OkStatus();
  if (!tokenizer.ok()) return tokenizer.status();
  // Embedding tables are often padded to more rows than there are tokens; fewer rows is a broken
  // checkpoint.
  if ((*tokenizer)->vocab_size() > loaded->config.vocab_size) {
    return DataLossError("tokenizer: {} tokens do not fit the embedding table (limit {}, got {})",
                         loaded->path, loaded->config.vocab_size, (*tokenizer)->vocab_size());
  }
  loaded->tokenizer = *std::move(tokenizer);
  if (loaded->defaults.eos_token_ids.empty() && loaded->tokenizer->eos().has_value()) {
    loaded->defaults.eos_token_ids.push_back(*loaded->tokenizer->eos());
  }
  return AttachChatFormat(loaded);
}

// Before anything is read: weights take about the bytes that they have in the files, rotary angles
// one table on the host and one on the backend.
absl::Status CheckMemory(const Checkpoint& checkpoint, const LoadedModel& loaded) {
  int64_t needed = int64_t{2} * loaded.context_length * loaded.config.head_dim *
                   static_cast<int64_t>(sizeof(float));
  for (const TensorInfo& tensor : checkpoint.tensors->tensors()) needed += tensor.num_bytes;
  const int64_t free_bytes = loaded.backend->info().free_memory_bytes;
  if (needed <= free_bytes) return absl::OkStatus();
  return UnavailableError("{}: needs {} MiB, {} MiB free", loaded.path, needed >> 20,
                          free_bytes >> 20);
}

}  // namespace

absl::StatusOr<LoadedModel> LoadModel(const std::string& path, int32_t context_length,
                                      const BackendOptions& backend_options,
                                      const LoadProgress& progress) {
  FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(path));
  return LoadModel(checkpoint, context_length, backend_options, progress);
}

absl::StatusOr<LoadedModel> LoadModel(const Checkpoint& checkpoint, int32_t context_length,
                                      const BackendOptions& backend_options,
                                      const LoadProgress& progress, const LoadCheck& check) {
  LoadedModel loaded;
  loaded.path = checkpoint.path;
  FQ_ASSIGN_OR_RETURN(loaded.config, ParseModelConfig(checkpoint));
  FQ_ASSIGN_OR_RETURN(loaded.defaults, ParseGenerationDefaults(checkpoint, loaded.config));
  FQ_RETURN_IF_ERROR(AttachTokenizer(&loaded));
  loaded.context_length = context_length == 0 ? loaded.config.max_position : context_length;
  if (loaded.context_length > loaded.config.max_position) {
    return FailedPreconditionError("context_length: above the model's context (limit {}, got {})",
                                   loaded.config.max_position, loaded.context_length);
  }
  BackendOptions options = backend_options;
  if (options.kernel_plans.empty()) {
    FQ_ASSIGN_OR_RETURN(options.kernel_plans, ReadModelKernelPlans(loaded.path));
  }
  FQ_ASSIGN_OR_RETURN(loaded.backend, CreateBackend(options));
  // A memory plan is the better rule, where there is one.
  const bool is_planned = check && loaded.backend->info().total_memory_bytes > 0;
  if (!is_planned) FQ_RETURN_IF_ERROR(CheckMemory(checkpoint, loaded));
  if (check) FQ_RETURN_IF_ERROR(check(loaded));
  const std::vector<float> rope_table = MakeRopeTable(loaded.config, loaded.context_length);
  FQ_ASSIGN_OR_RETURN(loaded.model, DecoderModel::Load(checkpoint, loaded.config, rope_table,
                                                       loaded.backend.get(), progress));
  loaded.weight_bytes = CountWeightBytes(*checkpoint.tensors);
  return loaded;
}

}  // namespace flashquant
