// SamplingInput: how each logit row of a step is to be drawn, as the arrays that
// Backend::SampleTokens reads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/staged_array.h"
#include "engine/scheduler/step_plan.h"
#include "kernels/backend.h"

namespace flashquant {

class SamplingInput final {
 public:
  // `max_token_counts`: of one sequence. `eos_token_ids`: what a sequence below its
  // min_output_tokens must not draw, with its own stop tokens.
  static absl::StatusOr<std::unique_ptr<SamplingInput>> Create(Backend* backend,
                                                               int32_t max_sequences,
                                                               int32_t max_token_counts,
                                                               std::vector<int32_t> eos_token_ids);

  // One row per sequence of the plan that samples, in its order, then greedy ones up to
  // `least_rows`, at most max_sequences.
  absl::Status Load(const StepPlan& plan, int32_t least_rows);

  const SampleRow* rows() const { return rows_.device(); }
  const int32_t* banned_ids() const { return banned_ids_.device(); }
  const TokenCount* token_counts() const { return token_counts_.device(); }
  const TokenBias* biases() const { return biases_.device(); }

 private:
  SamplingInput(Backend* backend, std::vector<int32_t> eos_token_ids)
      : backend_(backend), eos_token_ids_(std::move(eos_token_ids)) {}

  Backend* const backend_;
  const std::vector<int32_t> eos_token_ids_;
  StagedArray<SampleRow> rows_;
  StagedArray<int32_t> banned_ids_;
  StagedArray<TokenCount> token_counts_;
  StagedArray<TokenBias> biases_;
};

}  // namespace flashquant
