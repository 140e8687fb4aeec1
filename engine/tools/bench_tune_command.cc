// flashquant bench tune: measures, on this machine's GPU, every way to spread the fused kernel over
// the card for a model's shapes, and writes the best ones to a file that loading the model reads
// (engine/checkpoint/kernel_plans.h).
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/kernel_plans.h"
#include "engine/model/model_config.h"
#include "engine/tools/bench_input.h"
#include "engine/tools/commands.h"
#include "engine/tools/run_tool.h"
#include "kernels/base/status_macros.h"
#include "kernels/bench/kernel_bench.h"

namespace flashquant {
namespace {

using bench::KernelShape;
using bench::KernelTiming;

constexpr double kMaxDensity = 0.5;

struct Flags {
  std::string shapes;
  std::string model;
  std::string out;
  double density = 0.01;
};

// The layers of a decoder as they are joined when it is loaded.
absl::StatusOr<std::vector<KernelShape>> ShapesOfModel(const std::string& path) {
  FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(path));
  FQ_ASSIGN_OR_RETURN(const ModelConfig config, ParseModelConfig(checkpoint));
  const bool gated = config.family == DecoderFamily::kLlama;
  std::vector<KernelShape> shapes = {
      {config.hidden_size, config.qkv_size()},
      {config.num_heads * config.head_dim, config.hidden_size},
      {config.hidden_size, config.intermediate_size * (gated ? 2 : 1)},
      {config.intermediate_size, config.hidden_size}};
  for (const KernelShape& shape : shapes) {
    if (shape.k % 8 != 0 || shape.n % 8 != 0) {
      return UnimplementedError("{}: a layer of {}x{}; the kernel takes multiples of 8", path,
                                shape.k, shape.n);
    }
  }
  return shapes;
}

// One pass of 8, 16 and 32 rows each.
absl::StatusOr<std::vector<TunedPlan>> Measure(const std::vector<KernelShape>& shapes,
                                               double density) {
  std::string text;
  if (!bench::DescribeBenchDevice(&text, &text)) return UnavailableError("{}", text);
  fmt::print("{}\n       K x N    M        us  of stream  plan\n", text);
  bench::KernelBenchOptions options;
  options.shapes = shapes;
  options.ms = {8, 16, 32};
  options.densities = {density};
  options.cublas = false;
  options.sweep = true;
  options.print_sweep = false;
  std::vector<TunedPlan> plans;
  const auto row = [&](const KernelTiming& t) {
    fmt::print("{:>12}  {:>3}  {:>8.2f}  {:>8.1f}%  {}\n",
               fmt::format("{}x{}", t.shape.k, t.shape.n), t.m, t.us, 100 * t.stream_share(),
               t.plan);
    std::fflush(stdout);
    if (t.us <= 0) return;
    plans.push_back({t.num_sms, t.shape.k, t.shape.n, t.m / 8, t.best.num_ranks,
                     t.best.cluster_join, t.best.num_warps});
  };
  std::string error;
  if (!bench::TimeKernels(options, row, &error)) return UnavailableError("{}", error);
  return plans;
}

absl::Status RunBenchTune(const Flags& flags) {
  if (!flags.shapes.empty() && !flags.model.empty()) {
    return InvalidArgumentError("--shapes and --model: one of the two");
  }
  if (!(flags.density > 0 && flags.density <= kMaxDensity)) {
    return InvalidArgumentError("--density {}; above 0, up to {}", flags.density, kMaxDensity);
  }
  std::string out = flags.out;
  if (out.empty()) {
    out = flags.model.empty() ? std::string(kKernelPlansFile)
                              : (std::filesystem::path(flags.model) / kKernelPlansFile).string();
  }
  FQ_ASSIGN_OR_RETURN(std::vector<KernelShape> shapes, ParseKernelShapes(flags.shapes));
  if (!flags.model.empty()) {
    FQ_ASSIGN_OR_RETURN(shapes, ShapesOfModel(flags.model));
  }
  if (shapes.empty()) shapes = bench::DefaultKernelShapes();
  FQ_RETURN_IF_ERROR(CheckWritable(out));
  FQ_ASSIGN_OR_RETURN(const std::vector<TunedPlan> plans, Measure(shapes, flags.density));
  FQ_RETURN_IF_ERROR(WriteText(out, KernelPlansJson(plans)));
  fmt::print("{} plans in {}\n", plans.size(), out);
  return absl::OkStatus();
}

}  // namespace

void AddBenchTuneCommand(CLI::App& bench, int* exit_code) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = bench.add_subcommand(
      "tune",
      "Measure how the fused INT4 + outlier kernel is best spread over this GPU for the layers of "
      "a "
      "model, and write kernel_plans.json, which loading a model reads from its folder");
  command->add_option("--model", flags->model, "folder of the model; the file goes there");
  command->add_option("--shapes", flags->shapes,
                      "instead of a model: KxN,KxN,... or a file with one KxN a line; default: "
                      "seven shapes of current models");
  command->add_option("--out", flags->out, "write to this file");
  command->add_option("--density", flags->density, "stored outlier slots per weight; default 0.01");
  command->callback(
      [flags, exit_code] { *exit_code = RunTool([&] { return RunBenchTune(*flags); }); });
}

}  // namespace flashquant
