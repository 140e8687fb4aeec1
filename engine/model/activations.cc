#include "engine/model/activations.h"

#include "kernels/base/status_macros.h"

namespace flashquant {

absl::StatusOr<std::unique_ptr<Activations>> Activations::Create(Backend* backend,
                                                                 const ModelConfig& config,
                                                                 int32_t max_rows,
                                                                 int32_t max_logit_rows) {
  auto activations = std::make_unique<Activations>();
  activations->max_rows = max_rows;
  activations->max_logit_rows = max_logit_rows;
  const int64_t element = DTypeBytes(backend->info().activation_dtype);
  const int64_t rows = max_rows;
  const int64_t logit_rows = max_logit_rows;
  const int64_t attention_size = static_cast<int64_t>(config.num_heads) * config.head_dim;
  struct {
    DeviceBuffer* buffer;
    int64_t num_bytes;
  } const buffers[] = {
      {&activations->residual, rows * config.hidden_size * element},
      {&activations->hidden, rows * config.hidden_size * element},
      {&activations->qkv, rows * config.qkv_size() * element},
      {&activations->attention, rows * attention_size * element},
      {&activations->gate_up, rows * 2 * config.intermediate_size * element},
      {&activations->intermediate, rows * config.intermediate_size * element},
      {&activations->logits_input, logit_rows * config.hidden_size * element},
      {&activations->logits, logit_rows * config.vocab_size * DTypeBytes(DType::kF32)},
  };
  for (const auto& [buffer, num_bytes] : buffers) {
    FQ_ASSIGN_OR_RETURN(*buffer, backend->Allocate(num_bytes));
  }
  return activations;
}

}  // namespace flashquant
