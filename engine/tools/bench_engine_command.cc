// flashquant bench engine: decode and prefill times of a whole model on this machine, by stage and
// against what memory allows, beside the same engine on BF16 weights.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/file_reader.h"
#include "engine/quantize/parallel_for.h"
#include "engine/quantize/random_checkpoint.h"
#include "engine/tools/backend_flags.h"
#include "engine/tools/commands.h"
#include "engine/tools/engine_bench.h"
#include "engine/tools/run_tool.h"
#include "kernels/base/status_macros.h"
#include "kernels/bench/stream_rate.h"

namespace flashquant {
namespace {

struct Flags {
  std::string config;
  std::string model;
  std::optional<uint64_t> random_weights;
  std::vector<int32_t> batches = {1, 8, 16, 32, 64};
  std::vector<int32_t> contexts = {1024};
  std::string baseline;
  double density = 0.01;
  std::string group_size = "auto";
  bool asymmetric = false;
  std::string lm_head = "bf16";
  double temperature = 0;
  int steps = 20;
  int32_t token_budget = 2048;
  std::string csv;
  BackendFlags backend;
};

struct Row {
  EngineBenchCase bench_case;
  std::optional<DecodeTiming> timing;  // nothing: does not fit
};

struct Result {
  std::string name;
  std::vector<Row> rows;
  std::map<int32_t, double> prefill;  // seconds by context
};

RandomWeightOptions RandomOptions(const Flags& flags, bool int4) {
  RandomWeightOptions options;
  options.seed = flags.random_weights.value_or(1);
  options.int4 = int4;
  if (flags.group_size != "auto") options.quantize.group_size = std::stoll(flags.group_size);
  options.quantize.symmetric = !flags.asymmetric;
  options.quantize.density = flags.density;
  options.quantize.num_threads = AvailableThreads();
  options.quantize.lm_head = flags.lm_head == "int4"   ? TableFormat::kInt4
                             : flags.lm_head == "int8" ? TableFormat::kInt8
                                                       : TableFormat::kBFloat16;
  return options;
}

std::vector<EngineBenchCase> Cases(const Flags& flags) {
  std::vector<EngineBenchCase> cases;
  for (const int32_t context : flags.contexts) {
    for (const int32_t batch : flags.batches) cases.push_back({batch, context});
  }
  return cases;
}

double Milliseconds(double seconds) { return 1e3 * seconds; }

// Seconds that reading what a step must read takes; 0: the rate is not known.
double LimitSeconds(const DecodeTiming& timing, double gigabytes_per_second) {
  if (gigabytes_per_second <= 0) return 0;
  return 1e-9 * static_cast<double>(timing.weight_bytes + timing.kv_bytes) / gigabytes_per_second;
}

void PrintRow(const Row& row, double gigabytes_per_second) {
  fmt::print("{:>6} {:>8}", row.bench_case.batch, row.bench_case.context);
  if (!row.timing.has_value()) {
    fmt::print("  does not fit\n");
    return;
  }
  const DecodeTiming& timing = *row.timing;
  double rest = timing.step;
  fmt::print(" {:>8.3f} {:>9.1f} {:>7.3f}", Milliseconds(timing.step),
             row.bench_case.batch / timing.step, Milliseconds(timing.queue));
  for (const double seconds : timing.stages) {
    fmt::print(" {:>9.3f}", Milliseconds(seconds));
    rest -= seconds;
  }
  fmt::print(" {:>7.3f}", Milliseconds(rest));
  const double limit = LimitSeconds(timing, gigabytes_per_second);
  if (limit > 0) {
    fmt::print(" {:>7.3f} {:>5.0f}%", Milliseconds(limit), 100 * limit / timing.step);
  }
  fmt::print("\n");
  std::fflush(stdout);
}

absl::StatusOr<Result> Measure(const Checkpoint& checkpoint, const std::string& name,
                               const Flags& flags, double gigabytes_per_second) {
  EngineBenchOptions options;
  options.backend = flags.backend.options();
  options.cases = Cases(flags);
  options.temperature = static_cast<float>(flags.temperature);
  options.steps = flags.steps;
  options.token_budget =
      std::max(flags.token_budget, *std::max_element(flags.batches.begin(), flags.batches.end()));
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<EngineBench> bench,
                      EngineBench::Create(checkpoint, options));
  fmt::print("\n{}: {:.2f} GB read by a step, loaded in {:.1f} s, keys and values in {}, on {}\n",
             name, 1e-9 * static_cast<double>(bench->weight_bytes()), bench->load_seconds(),
             DTypeName(bench->backend_info().kv_dtype), bench->backend_info().device);
  fmt::print(
      " batch  context  step ms  tokens/s   queue   linears attention pointwise      head  "
      "sampling    rest{}\n",
      gigabytes_per_second > 0 ? "   limit  share" : "");
  Result result{name, {}, {}};
  for (const EngineBenchCase& bench_case : options.cases) {
    Row row{bench_case, std::nullopt};
    if (bench->Fits(bench_case)) {
      FQ_ASSIGN_OR_RETURN(row.timing, bench->TimeDecode(bench_case));
    }
    PrintRow(row, gigabytes_per_second);
    result.rows.push_back(row);
  }
  for (const int32_t context : flags.contexts) {
    if (!bench->Fits({1, context})) continue;
    FQ_ASSIGN_OR_RETURN(result.prefill[context], bench->TimePrefill(context));
    fmt::print("prefill of {} tokens: {:.2f} ms, {:.0f} tokens/s\n", context,
               Milliseconds(result.prefill[context]), context / result.prefill[context]);
  }
  return result;
}

void PrintComparison(const Result& result, const Result& baseline) {
  fmt::print("\n{} against {}\n batch  context  {:>9}  {:>9}  speedup\n", result.name,
             baseline.name, "ms", "base ms");
  for (size_t i = 0; i < result.rows.size(); ++i) {
    const Row& row = result.rows[i];
    const Row& other = baseline.rows[i];
    if (!row.timing.has_value() || !other.timing.has_value()) continue;
    fmt::print("{:>6} {:>8}  {:>9.3f}  {:>9.3f}  {:>6.2f}x\n", row.bench_case.batch,
               row.bench_case.context, Milliseconds(row.timing->step),
               Milliseconds(other.timing->step), other.timing->step / row.timing->step);
  }
  for (const auto& [context, seconds] : result.prefill) {
    const auto other = baseline.prefill.find(context);
    if (other == baseline.prefill.end()) continue;
    fmt::print("prefill {:>5}  {:>9.3f}  {:>9.3f}  {:>6.2f}x\n", context, Milliseconds(seconds),
               Milliseconds(other->second), other->second / seconds);
  }
}

absl::Status WriteCsv(const std::string& path, const std::vector<Result>& results,
                      double gigabytes_per_second) {
  std::FILE* const file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return ErrnoStatus(errno, path, "create");
  std::string text =
      "weights,batch,context,step_s,queue_s,linears_s,attention_s,pointwise_s,head_s,sampling_s,"
      "weight_bytes,kv_bytes,limit_s\n";
  for (const Result& result : results) {
    for (const Row& row : result.rows) {
      if (!row.timing.has_value()) continue;
      const DecodeTiming& timing = *row.timing;
      text += fmt::format("{},{},{},{:.7f},{:.7f},{:.7f},{},{},{:.7f}\n", result.name,
                          row.bench_case.batch, row.bench_case.context, timing.step, timing.queue,
                          fmt::join(timing.stages, ","), timing.weight_bytes, timing.kv_bytes,
                          LimitSeconds(timing, gigabytes_per_second));
    }
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int error_number = errno;
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed) return ErrnoStatus(written ? errno : error_number, path, "write");
  return absl::OkStatus();
}

absl::Status CheckFlags(const Flags& flags) {
  if (flags.config.empty() == flags.model.empty()) {
    return InvalidArgumentError("bench engine: give either --config or --model");
  }
  for (const int32_t batch : flags.batches) {
    if (batch < 1 || batch > 4096) return InvalidArgumentError("--batch {}; 1 to 4096", batch);
  }
  for (const int32_t context : flags.contexts) {
    if (context < 1) return InvalidArgumentError("--context {}; 1 or more", context);
  }
  return absl::OkStatus();
}

// As in "INT4 g128 + 1.00% outliers, head bf16".
std::string Describe(const Checkpoint& checkpoint) {
  const auto section = checkpoint.config.find("quantization_config");
  if (section == checkpoint.config.end()) return "BF16";
  const auto text = [&](const char* key) {
    const auto value = section->find(key);
    return value != section->end() && value->is_string() ? value->get<std::string>() : "bf16";
  };
  return fmt::format("INT4 g{} + {:.2f}% outliers, head {}", section->value("group_size", 0),
                     100 * section->value("stored_density", 0.0), text("lm_head"));
}

absl::Status RunBenchEngine(const Flags& flags) {
  FQ_RETURN_IF_ERROR(CheckFlags(flags));
  // A model's folder will do where only its configuration is needed.
  const std::string path = flags.config.empty() ? flags.model : flags.config;
  const bool random = !flags.config.empty() || flags.random_weights.has_value();
  const auto open = [&]() -> absl::StatusOr<Checkpoint> {
    if (random) return MakeRandomCheckpoint(path, RandomOptions(flags, /*int4=*/true));
    return OpenCheckpoint(path);
  };
  FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open());
  const double rate = bench::StreamGigabytesPerSecond();
  if (rate > 0) fmt::print("this GPU reads {:.0f} GB/s\n", rate);
  std::vector<Result> results;
  FQ_ASSIGN_OR_RETURN(Result result, Measure(checkpoint, Describe(checkpoint), flags, rate));
  results.push_back(std::move(result));
  if (flags.baseline == "bf16") {
    FQ_ASSIGN_OR_RETURN(const Checkpoint plain,
                        MakeRandomCheckpoint(path, RandomOptions(flags, /*int4=*/false)));
    FQ_ASSIGN_OR_RETURN(Result baseline, Measure(plain, "BF16", flags, rate));
    results.push_back(std::move(baseline));
    PrintComparison(results[0], results[1]);
  }
  return flags.csv.empty() ? absl::OkStatus() : WriteCsv(flags.csv, results, rate);
}

}  // namespace

void AddBenchEngineCommand(CLI::App& bench, int* exit_code) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = bench.add_subcommand(
      "engine",
      "Time decode and prefill steps of a model on this machine, with random weights of its shapes "
      "(--config) or its own (--model). A stage's time is what the step takes longer than without "
      "it; queue is the host's part; limit is reading weights, keys and values once");
  command->add_option("--config", flags->config, "config.json of the model, or its folder");
  command->add_option("--model", flags->model, "checkpoint folder");
  command->add_option("--random-weights", flags->random_weights,
                      "seed of random weights of the model's shapes");
  command->add_option("--batch", flags->batches, "sequences of a step; default 1,8,16,32,64")
      ->delimiter(',');
  command->add_option("--context", flags->contexts, "tokens of each sequence; default 1024")
      ->delimiter(',');
  command->add_option("--baseline", flags->baseline, "also time BF16 weights of the same shapes")
      ->check(CLI::IsMember({"bf16"}));
  command->add_option("--density", flags->density, "outliers of random weights")
      ->check(CLI::Range(0.0, 0.2))
      ->capture_default_str();
  command->add_option("--group-size", flags->group_size, "of random weights")
      ->check(CLI::IsMember({"auto", "32", "64", "128", "-1"}))
      ->capture_default_str();
  command->add_flag("--asymmetric", flags->asymmetric, "random weights with zero points");
  command->add_option("--lm-head", flags->lm_head, "head of random weights")
      ->check(CLI::IsMember({"bf16", "int8", "int4"}))
      ->capture_default_str();
  command
      ->add_option("--temperature", flags->temperature, "0: greedy; above: drawn with top-p 0.95")
      ->check(CLI::Range(0.0, 2.0))
      ->capture_default_str();
  command->add_option("--steps", flags->steps, "of each measurement")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option("--token-budget", flags->token_budget, "tokens of a prefill step")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  command->add_option("--csv", flags->csv, "also write the numbers to this file");
  AddBackendFlags(command, &flags->backend);
  command->callback(
      [flags, exit_code] { *exit_code = RunTool([&] { return RunBenchEngine(*flags); }); });
}

}  // namespace flashquant
