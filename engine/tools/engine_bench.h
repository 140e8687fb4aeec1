// EngineBench: times of prefill and decode steps of one model, run by the engine's own step runner,
// the next step launched before the last one is collected.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/model/decoder_model.h"
#include "engine/model/model_step_runner.h"
#include "engine/tools/stage_backend.h"
#include "kernels/backend_factory.h"

namespace flashquant {

struct EngineBenchCase {
  int32_t batch = 0;    // sequences of a decode step
  int32_t context = 0;  // tokens of each, the step's own included
};

struct EngineBenchOptions {
  BackendOptions backend;
  std::vector<EngineBenchCase> cases;
  int32_t token_budget = 2048;  // of a prefill step
  int32_t block_tokens = 16;
  float temperature = 0.0f;  // with top-p 0.95 above 0
  int steps = 20;            // of each measurement
};

// Seconds.
struct DecodeTiming {
  double step = 0;
  double queue = 0;  // of it, until the host had queued it
  // What the step takes longer than without the stage; what is left is in none of them.
  std::array<double, kNumStages> stages{};
  int64_t weight_bytes = 0;  // read by a step: packed weights and head
  int64_t kv_bytes = 0;
};

class EngineBench final {
 public:
  // Loads the model with room for the largest case that fits the free memory. Errors of loading;
  // RESOURCE_EXHAUSTED when no case fits, INVALID_ARGUMENT for a case beyond the model's context.
  static absl::StatusOr<std::unique_ptr<EngineBench>> Create(const Checkpoint& checkpoint,
                                                             const EngineBenchOptions& options);

  bool Fits(const EngineBenchCase& bench_case) const;
  // Medians of three rounds. The keys and values are those of a prefill up to 65536 tokens in all,
  // zeros beyond.
  absl::StatusOr<DecodeTiming> TimeDecode(const EngineBenchCase& bench_case);
  // Seconds that a prompt of so many tokens takes, in steps of the token budget.
  absl::StatusOr<double> TimePrefill(int32_t num_tokens);

  const BackendInfo& backend_info() const { return info_; }
  double load_seconds() const { return load_seconds_; }
  int64_t weight_bytes() const { return model_->weights().StepBytes(); }

 private:
  explicit EngineBench(const EngineBenchOptions& options) : options_(options) {}
  int32_t BlocksOf(const EngineBenchCase& bench_case) const;
  absl::Status MakeRunner(const ModelConfig& config);
  // Runs tokens [0, num_tokens) of one sequence.
  absl::Status Prefill(int32_t sequence, int32_t context, int32_t num_tokens);
  absl::Status LaunchDecode(const EngineBenchCase& bench_case);
  absl::StatusOr<double> TimeSteps(const EngineBenchCase& bench_case, int steps, double* queue);

  const EngineBenchOptions options_;
  BackendInfo info_;
  double load_seconds_ = 0;
  int32_t num_blocks_ = 0;
  EngineBenchCase prefilled_;
  std::vector<int32_t> block_ids_;  // all but the null block
  SamplingParams sampling_;
  StopConditions stop_;
  // Destroyed in reverse order.
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<StageBackend> stages_;
  std::unique_ptr<DecoderModel> model_;
  std::unique_ptr<ModelStepRunner> runner_;
};

}  // namespace flashquant
