// BatchInput: a step's plan as the flat arrays that the ops read, on the host and copied to the
// backend.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/model/staged_array.h"
#include "engine/scheduler/step_plan.h"
#include "kernels/backend.h"

namespace flashquant {

// The most that a step can hold; buffers are made once from it.
struct BatchLimits {
  int32_t max_rows = 0;  // token budget rounded up to the row multiple
  int32_t max_sequences = 0;
  int32_t max_blocks = 0;  // block ids of all sequences of a step together
  int32_t block_tokens = 0;
};

// Rows: the sequences' tokens one after the other, then padding rows (token 0, position 0, slot
// -1), which take part in the linear layers only. Logit rows: the last row of each sequence that
// samples, in the plan's order.
class BatchInput final {
 public:
  static absl::StatusOr<std::unique_ptr<BatchInput>> Create(Backend* backend,
                                                            const BatchLimits& limits);

  // Builds the arrays of `plan` and copies them to the backend. A plan beyond the limits is a bug.
  absl::Status Load(const StepPlan& plan);

  int32_t num_rows() const { return num_rows_; }
  int32_t num_logit_rows() const { return logit_rows_.size(); }

  // Backend memory.
  const int32_t* token_ids() const { return token_ids_.device(); }
  const int32_t* previous_rows() const { return previous_rows_.device(); }
  const int32_t* positions() const { return positions_.device(); }
  const int64_t* slots() const { return slots_.device(); }
  const int32_t* logit_rows() const { return logit_rows_.device(); }
  AttentionBatch attention() const;
  // The same arrays on the host, for Backend::PlanAttention.
  AttentionBatch host_attention() const;

 private:
  BatchInput(Backend* backend, const BatchLimits& limits) : backend_(backend), limits_(limits) {}
  void AppendSequence(const SequenceStep& step);

  Backend* const backend_;
  const BatchLimits limits_;
  int32_t num_rows_ = 0;
  int32_t num_tokens_ = 0;
  StagedArray<int32_t> token_ids_;
  StagedArray<int32_t> previous_rows_;
  StagedArray<int32_t> positions_;
  StagedArray<int64_t> slots_;
  StagedArray<int32_t> logit_rows_;
  StagedArray<int32_t> query_indptr_;
  StagedArray<int32_t> context_lengths_;
  StagedArray<int32_t> block_indptr_;
  StagedArray<int32_t> block_ids_;
};

}  // namespace flashquant
