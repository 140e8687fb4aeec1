// ModelStepRunner: runs a scheduler's step on a DecoderModel: plan to arrays, forward, head,
// sampling.
//
// Sampled ids stay in backend memory, so that the next step can read a token that the host has not
// seen. Holds no request state besides that. Decode steps, which are the same ops again and again,
// are recorded where the backend can do that, one recording per number of rows.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/decoder_model.h"
#include "engine/model/sampling_input.h"
#include "engine/step_runner.h"

namespace flashquant {

struct StepRunnerOptions {
  int32_t token_budget = 0;  // tokens of a step
  int32_t row_multiple = 1;
  int32_t max_sequences = 0;   // sequences of a step
  int32_t context_length = 0;  // tokens of a sequence
  int32_t block_tokens = 16;
  int32_t num_blocks = 0;  // null block included
  std::vector<int32_t> eos_token_ids = {};
  bool record_decode = false;  // BackendInfo::records_ops
};

class ModelStepRunner final : public StepRunner {
 public:
  // Allocates everything that a step needs. `model` and `backend` must outlive the runner.
  static absl::StatusOr<std::unique_ptr<ModelStepRunner>> Create(const DecoderModel* model,
                                                                 Backend* backend,
                                                                 const StepRunnerOptions& options);

  absl::Status Launch(const StepPlan& plan) override;
  absl::StatusOr<StepResult> Collect() override;
  // A backend that queues its ops does sampling and the copy back later, in the time of the
  // forward pass: only `upload` is then told apart.
  StepTimes last_times() const override { return last_times_; }

 private:
  struct LaunchedRow {
    SequenceId id = 0;
    std::optional<int32_t> top_logprobs;
  };
  struct LaunchedStep {
    std::vector<LaunchedRow> rows;  // who samples
    StepTimes times;
  };

  ModelStepRunner(const DecoderModel* model, Backend* backend, const StepRunnerOptions& options);
  // Whether the step's ops depend on nothing but its number of rows.
  bool IsRecordable(const StepPlan& plan) const;
  int64_t logprobs_offset() const;  // in samples_
  static OutputLogprobs LogprobsOf(const uint8_t* row, int32_t top_logprobs);
  // Everything from the embedding to the sampled ids, between marks; `logit_rows` null: all rows in
  // order. key 0: not recorded.
  absl::Status QueueOps(int32_t key, const int32_t* logit_rows, int32_t num_samples);
  absl::Status QueueSampling(int32_t num_samples);

  const DecoderModel* const model_;
  Backend* const backend_;
  const StepRunnerOptions options_;
  const int32_t max_samples_;  // sequences of a step, padding included
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Activations> activations_;
  std::unique_ptr<BatchInput> batch_;
  std::unique_ptr<SamplingInput> sampling_;
  // [max_samples_] i32 token ids, then u8 marks of non-finite rows, then [max_samples_,
  // kLogprobsPerRow] logprobs, of the step queued last. The next step reads the ids before it
  // writes its own. The logprobs are copied back only when a row asks for them.
  DeviceBuffer samples_;
  DeviceBuffer scratch_;  // [max_samples_, V] FP32: where rows with logprobs are drawn
  int64_t num_launched_ = 0;
  int64_t num_collected_ = 0;
  std::deque<LaunchedStep> launched_;  // uncollected
  StepTimes times_;                    // of the step that is being launched
  StepTimes last_times_;
  const SteadyClock clock_;
};

}  // namespace flashquant
