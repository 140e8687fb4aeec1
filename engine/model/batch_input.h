// BatchInput: a step's plan as the flat arrays that the ops read, on the host and copied to the
// backend.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
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
//
// All arrays are copied at once. Where each lies depends on the numbers of rows and sequences
// alone.
class BatchInput final {
 public:
  static absl::StatusOr<std::unique_ptr<BatchInput>> Create(Backend* backend,
                                                            const BatchLimits& limits);

  // Builds the arrays of `plan` and copies them to the backend. A plan beyond the limits is a bug.
  absl::Status Load(const StepPlan& plan);
  // The same for a plan whose sequences all have one token and sample, with padding rows as
  // sequences of context 0: sizes and pointers depend on the number of rows alone. Every row is a
  // logit row.
  absl::Status LoadDecode(const StepPlan& plan);

  int32_t num_rows() const { return num_rows_; }
  int32_t num_logit_rows() const { return logit_rows_.size(); }

  // Backend memory.
  const int32_t* token_ids() const { return token_ids_.device; }
  const int32_t* previous_rows() const { return previous_rows_.device; }
  const int32_t* positions() const { return positions_.device; }
  const int64_t* slots() const { return slots_.device; }
  const int32_t* logit_rows() const { return logit_rows_.device; }
  AttentionBatch attention() const;
  // The same arrays on the host, for Backend::PlanAttention.
  AttentionBatch host_attention() const;

 private:
  template <typename T>
  struct Array {
    std::vector<T> host;
    const T* device = nullptr;  // after Upload
    void Push(T value) { host.push_back(value); }
    int32_t size() const { return static_cast<int32_t>(host.size()); }
  };

  BatchInput(Backend* backend, const BatchLimits& limits) : backend_(backend), limits_(limits) {}
  void Clear();
  void AppendSequence(const SequenceStep& step);
  void AppendPaddingRow();
  absl::Status Upload();
  template <typename T>
  void Place(Array<T>* array);

  Backend* const backend_;
  const BatchLimits limits_;
  int32_t num_rows_ = 0;
  int32_t num_tokens_ = 0;
  Array<int32_t> token_ids_;
  Array<int32_t> previous_rows_;
  Array<int32_t> positions_;
  Array<int64_t> slots_;
  Array<int32_t> logit_rows_;
  Array<int32_t> query_indptr_;
  Array<int32_t> context_lengths_;
  Array<int32_t> block_indptr_;
  Array<int32_t> block_ids_;
  std::vector<uint8_t> staged_;  // all arrays, as they are copied
  DeviceBuffer device_;
};

}  // namespace flashquant
