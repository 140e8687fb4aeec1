#include "engine/tools/engine_bench.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include "engine/model/rope_table.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

using WallClock = std::chrono::steady_clock;

constexpr int64_t kPrefilledTokens = 65536;
constexpr int64_t kSpareBytes = int64_t{2} << 30;  // activations, graphs
constexpr int kRounds = 3;

double SecondsSince(WallClock::time_point begin) {
  return std::chrono::duration<double>(WallClock::now() - begin).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Ids that do not repeat within a step.
std::vector<int32_t> TokenIds(int32_t first, int32_t count, int32_t vocab_size) {
  std::vector<int32_t> ids;
  for (int64_t i = first; i < int64_t{first} + count; ++i) {
    ids.push_back(static_cast<int32_t>(i * 7919 % vocab_size));
  }
  return ids;
}

}  // namespace

absl::StatusOr<std::unique_ptr<EngineBench>> EngineBench::Create(
    const Checkpoint& checkpoint, const EngineBenchOptions& options) {
  std::unique_ptr<EngineBench> bench(new EngineBench(options));
  FQ_ASSIGN_OR_RETURN(const ModelConfig config, ParseModelConfig(checkpoint));
  int32_t context = 0;
  for (const EngineBenchCase& each : options.cases) {
    context = std::max(context, each.context);
    if (each.context > config.max_position) {
      return InvalidArgumentError("--context {}: above the model's context ({})", each.context,
                                  config.max_position);
    }
  }
  bench->sampling_.temperature = options.temperature;
  if (options.temperature > 0) bench->sampling_.top_p = 0.95f;
  FQ_ASSIGN_OR_RETURN(bench->backend_, CreateBackend(options.backend));
  bench->info_ = bench->backend_->info();
  bench->stages_ = std::make_unique<StageBackend>(bench->backend_.get());
  const auto begin = WallClock::now();
  const std::vector<float> rope =
      MakeRopeTable(RopeInverseFrequencies(config.rope, config.head_dim), context);
  FQ_ASSIGN_OR_RETURN(bench->model_,
                      DecoderModel::Load(checkpoint, config, rope, bench->stages_.get(), nullptr));
  bench->stages_->SetHead(bench->model_->weights().lm_head());
  FQ_RETURN_IF_ERROR(bench->backend_->Synchronize());
  bench->load_seconds_ = SecondsSince(begin);
  FQ_RETURN_IF_ERROR(bench->MakeRunner(config));
  return bench;
}

absl::Status EngineBench::MakeRunner(const ModelConfig& config) {
  const PagedKvGeometry geometry = {.num_layers = config.num_layers,
                                    .block_tokens = options_.block_tokens,
                                    .num_kv_heads = config.num_kv_heads,
                                    .head_dim = config.head_dim};
  const int64_t block_bytes = KvCache::BlockBytes(geometry, info_.kv_dtype);
  const int64_t most_blocks =
      std::max<int64_t>(0, backend_->info().free_memory_bytes - kSpareBytes) / block_bytes;
  int32_t max_batch = 0;
  int32_t max_context = 0;
  for (const EngineBenchCase& each : options_.cases) {
    const int32_t blocks = BlocksOf(each);
    if (blocks > most_blocks) continue;
    num_blocks_ = std::max(num_blocks_, blocks);
    max_batch = std::max(max_batch, each.batch);
    max_context = std::max(max_context, each.context);
  }
  if (num_blocks_ == 0) {
    return ResourceExhaustedError("no case fits: the smallest KV pool has more than {} blocks",
                                  most_blocks);
  }
  for (int32_t block = 1; block < num_blocks_; ++block) block_ids_.push_back(block);
  FQ_ASSIGN_OR_RETURN(runner_, ModelStepRunner::Create(model_.get(), stages_.get(),
                                                       {.token_budget = options_.token_budget,
                                                        .row_multiple = info_.row_multiple,
                                                        .max_sequences = max_batch,
                                                        .context_length = max_context,
                                                        .block_tokens = options_.block_tokens,
                                                        .num_blocks = num_blocks_,
                                                        .record_decode = info_.records_ops}));
  return absl::OkStatus();
}

// The null block included.
int32_t EngineBench::BlocksOf(const EngineBenchCase& bench_case) const {
  return bench_case.batch * CeilDiv(bench_case.context, options_.block_tokens) + 1;
}

bool EngineBench::Fits(const EngineBenchCase& bench_case) const {
  return BlocksOf(bench_case) <= num_blocks_;
}

absl::Status EngineBench::Prefill(int32_t sequence, int32_t context, int32_t num_tokens) {
  const int32_t blocks = CeilDiv(context, options_.block_tokens);
  const auto mine =
      std::span<const int32_t>(block_ids_)
          .subspan(static_cast<size_t>(sequence * blocks), static_cast<size_t>(blocks));
  for (int32_t done = 0; done < num_tokens;) {
    const int32_t count = std::min(options_.token_budget, num_tokens - done);
    const std::vector<int32_t> ids =
        TokenIds(sequence * 31 + done, count, model_->config().vocab_size);
    StepPlan plan;
    plan.phase = StepPhase::kPrefill;
    plan.num_tokens = count;
    plan.num_rows = RoundUp(count, info_.row_multiple);
    plan.sequences.push_back({.first_position = done,
                              .token_ids = ids,
                              .block_ids = mine,
                              .samples = done + count == num_tokens,
                              .sampling = &sampling_,
                              .stop = &stop_});
    FQ_RETURN_IF_ERROR(runner_->Launch(plan));
    FQ_RETURN_IF_ERROR(runner_->Collect().status());
    done += count;
  }
  return absl::OkStatus();
}

absl::StatusOr<double> EngineBench::TimePrefill(int32_t num_tokens) {
  prefilled_ = {};
  FQ_RETURN_IF_ERROR(Prefill(0, num_tokens, num_tokens));
  const auto begin = WallClock::now();
  FQ_RETURN_IF_ERROR(Prefill(0, num_tokens, num_tokens));
  return SecondsSince(begin);
}

absl::Status EngineBench::LaunchDecode(const EngineBenchCase& bench_case) {
  const int32_t blocks = CeilDiv(bench_case.context, options_.block_tokens);
  static constexpr int32_t kToken = 1;
  StepPlan plan;
  plan.num_tokens = bench_case.batch;
  plan.num_rows = RoundUp(bench_case.batch, info_.row_multiple);
  for (int32_t i = 0; i < bench_case.batch; ++i) {
    const auto mine = std::span<const int32_t>(block_ids_)
                          .subspan(static_cast<size_t>(i * blocks), static_cast<size_t>(blocks));
    plan.sequences.push_back({.id = i,
                              .first_position = bench_case.context - 1,
                              .token_ids = std::span(&kToken, 1),
                              .block_ids = mine,
                              .samples = true,
                              .sampling = &sampling_,
                              .stop = &stop_,
                              .previous_row = i});
  }
  return runner_->Launch(plan);
}

// Seconds a step. The same position is run again and again, so that the context stays as asked for.
absl::StatusOr<double> EngineBench::TimeSteps(const EngineBenchCase& bench_case, int steps,
                                              double* queue) {
  constexpr int kWarmUp = 3;
  WallClock::time_point begin;
  double queued = 0;
  FQ_RETURN_IF_ERROR(LaunchDecode(bench_case));
  for (int i = 0; i < kWarmUp + steps; ++i) {
    if (i == kWarmUp) begin = WallClock::now();
    const auto launch_begin = WallClock::now();
    FQ_RETURN_IF_ERROR(LaunchDecode(bench_case));
    if (i >= kWarmUp) queued += SecondsSince(launch_begin);
    FQ_RETURN_IF_ERROR(runner_->Collect().status());
  }
  const double seconds = SecondsSince(begin);
  FQ_RETURN_IF_ERROR(runner_->Collect().status());
  *queue = queued / steps;
  return seconds / steps;
}

absl::StatusOr<DecodeTiming> EngineBench::TimeDecode(const EngineBenchCase& bench_case) {
  if (prefilled_.batch != bench_case.batch || prefilled_.context != bench_case.context) {
    const int64_t sequences = kPrefilledTokens / bench_case.context;
    for (int32_t i = 0; i < std::min<int64_t>(sequences, bench_case.batch); ++i) {
      FQ_RETURN_IF_ERROR(Prefill(i, bench_case.context, bench_case.context));
    }
    prefilled_ = bench_case;
  }
  DecodeTiming timing;
  std::vector<double> rounds;
  std::vector<double> queues(kRounds);
  for (double& queue : queues) {
    FQ_ASSIGN_OR_RETURN(const double seconds, TimeSteps(bench_case, options_.steps, &queue));
    rounds.push_back(seconds);
  }
  timing.step = Median(rounds);
  timing.queue = Median(queues);
  for (int stage = 0; stage < kNumStages; ++stage) {
    stages_->LeaveOut(static_cast<Stage>(stage));
    double queue = 0;
    const absl::StatusOr<double> without = TimeSteps(bench_case, options_.steps, &queue);
    stages_->LeaveNothingOut();
    if (!without.ok()) return without.status();
    timing.stages[static_cast<size_t>(stage)] = std::max(0.0, timing.step - *without);
  }
  timing.weight_bytes = weight_bytes();
  const ModelConfig& config = model_->config();
  timing.kv_bytes = int64_t{bench_case.batch} * bench_case.context * 2 * config.num_layers *
                    config.num_kv_heads * config.head_dim * DTypeBytes(info_.kv_dtype);
  return timing;
}

}  // namespace flashquant
