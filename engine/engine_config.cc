// Ranges of the engine's options.
#include "engine/engine_config.h"

#include <string_view>

#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

template <typename T>
absl::Status CheckRange(std::string_view key, T value, T low, T high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return FailedPreconditionError("{}: must be within {} and {} (got {})", key, low, high, value);
}

}  // namespace

absl::Status EngineConfig::Validate() const {
  FQ_RETURN_IF_ERROR(CheckRange("context_length", context_length, 0, 1 << 24));
  FQ_RETURN_IF_ERROR(CheckRange("max_sequences", max_sequences, 1, 4096));
  FQ_RETURN_IF_ERROR(CheckRange("token_budget", token_budget, 1, 1 << 17));
  FQ_RETURN_IF_ERROR(CheckRange("max_waiting", max_waiting, 1, 1 << 20));
  // Positions times this stay below 2^32, which the GPU's division by it needs.
  FQ_RETURN_IF_ERROR(CheckRange("block_tokens", block_tokens, 1, 256));
  FQ_RETURN_IF_ERROR(CheckRange("num_blocks", num_blocks, 0, 1 << 26));
  FQ_RETURN_IF_ERROR(CheckRange("row_multiple", row_multiple, 1, 4096));
  FQ_RETURN_IF_ERROR(CheckRange("priority_ageing_ms", priority_ageing_ms, 1, 3'600'000));
  FQ_RETURN_IF_ERROR(CheckRange("prompt_patience", prompt_patience, 0.0, 1000.0));
  FQ_RETURN_IF_ERROR(CheckRange("fill_wait_ms", fill_wait_ms, 0.0, 1000.0));
  FQ_RETURN_IF_ERROR(CheckRange("gap_target_ms", gap_target_ms, 0.1, 60'000.0));
  // Less would let the oldest sequences starve the others of their one token per step.
  if (token_budget < max_sequences) {
    return FailedPreconditionError(
        "token_budget: must be at least max_sequences (limit {}, got {})", max_sequences,
        token_budget);
  }
  if (num_blocks == 1) {
    return FailedPreconditionError("num_blocks: must be 0 or at least 2 (got 1)");
  }
  return absl::OkStatus();
}

}  // namespace flashquant
