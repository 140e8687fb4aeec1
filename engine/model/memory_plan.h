// MemoryPlan: what a checkpoint's weights and a server's buffers take on a GPU, from the headers
// alone: nothing is read, no GPU is needed.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/model/model_config.h"
#include "kernels/base/dtype.h"

namespace flashquant {

struct MemoryPlanOptions {
  int32_t max_sequences = 64;
  int32_t context_length = 0;  // 0 = the model's
  int32_t token_budget = 256;
  int32_t block_tokens = 16;
  DType kv_dtype = DType::kBF16;
};

// Bytes.
struct MemoryPlan {
  int32_t context_length = 0;
  int64_t layers = 0;  // linear layers, outliers apart
  int64_t outliers = 0;
  int64_t tables = 0;  // embedding and head
  int64_t small = 0;   // norms, rotary table
  int64_t activations = 0;
  int64_t scratch = 0;  // cuBLAS, partial sums, unpacked layer
  int64_t recordings = 0;
  int64_t token = 0;    // keys and values of one token
  int64_t context = 0;  // of one sequence of context_length, whole blocks
  int64_t pool = 0;     // of max_sequences of them and the null block

  int64_t weights() const { return layers + outliers + tables + small; }
  int64_t without_pool() const { return weights() + activations + scratch + recordings; }
};

// FAILED_PRECONDITION for a context longer than the model's; errors of ParseModelConfig.
absl::StatusOr<MemoryPlan> MakeMemoryPlan(const Checkpoint& checkpoint,
                                          const MemoryPlanOptions& options);

// "24GiB", "80GB", "512MiB" or plain bytes. INVALID_ARGUMENT otherwise.
absl::StatusOr<int64_t> ParseMemorySize(const std::string& text);

// Lines for people: the parts, and with gpu_memory_bytes > 0 whether they fit a card of so many
// bytes, what of it is left for keys and values, and what to change when they do not.
// `reserved_bytes`: of the card, for its driver and others.
std::string DescribeMemoryPlan(const MemoryPlan& plan, const MemoryPlanOptions& options,
                               int64_t gpu_memory_bytes, int64_t reserved_bytes);

}  // namespace flashquant
