// ModelStepRunner: runs a scheduler's step on a DecoderModel: plan to arrays, forward, head,
// sampling.
//
// Sampled ids stay in backend memory, two steps of them, so that the next step can read a token
// that the host has not seen. Holds no request state besides that.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
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
};

class ModelStepRunner final : public StepRunner {
 public:
  // Allocates everything that a step needs. `model` and `backend` must outlive the runner.
  static absl::StatusOr<std::unique_ptr<ModelStepRunner>> Create(const DecoderModel* model,
                                                                 Backend* backend,
                                                                 const StepRunnerOptions& options);

  absl::Status Launch(const StepPlan& plan) override;
  absl::StatusOr<StepResult> Collect() override;

 private:
  // The sampled ids of one launched step.
  struct Samples {
    DeviceBuffer token_ids;   // [max_sequences] i32
    DeviceBuffer non_finite;  // [max_sequences] u8
  };

  ModelStepRunner(const DecoderModel* model, Backend* backend) : model_(model), backend_(backend) {}
  absl::Status Sample(int32_t num_rows, const Samples& samples);

  const DecoderModel* const model_;
  Backend* const backend_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Activations> activations_;
  std::unique_ptr<BatchInput> batch_;
  std::unique_ptr<SamplingInput> sampling_;
  std::array<Samples, 2> samples_;
  int64_t num_launched_ = 0;
  int64_t num_collected_ = 0;
  std::deque<std::vector<SequenceId>> launched_ids_;  // who sampled, per uncollected step
};

}  // namespace flashquant
