// flashquant bench kernel: times of the fused linear kernel on this machine's GPU, and the paper's
// figures for this machine as tables, CSV and drawings (kernels/bench/).
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "engine/tools/bench_input.h"
#include "engine/tools/commands.h"
#include "engine/tools/run_tool.h"
#include "kernels/base/status_macros.h"
#include "kernels/bench/figure.h"
#include "kernels/bench/kernel_bench.h"
#include "kernels/bench/paper_figures.h"

namespace flashquant {
namespace {

using bench::Figure;
using bench::KernelBenchOptions;
using bench::KernelShape;
using bench::KernelTiming;

constexpr double kMaxDensity = 0.5;

struct Flags {
  std::string shapes;
  std::vector<int> ms;
  std::vector<double> densities;
  std::string csv;
  std::string plot;
  int figure = 0;  // 0: none
  std::string path = "auto";
  int shared_kb = 0;
  bool no_baselines = false;
};

std::string CsvOf(const std::vector<KernelTiming>& timings) {
  std::string out =
      "k,n,m,density,us,gb_per_s,stream_share,speedup_over_cublas,speedup_over_dense_only,"
      "speedup_over_unfused,bytes,stream_us,cublas_us,dense_only_us,unfused_us,plan\n";
  for (const KernelTiming& t : timings) {
    out += fmt::format("{},{},{},{:g},{:.3f},{:.1f},{:.4f},{:.4f},{:.4f},{:.4f},", t.shape.k,
                       t.shape.n, t.m, t.density, t.us, t.gb_per_s(), t.stream_share(),
                       t.speedup(t.cublas_us), t.speedup(t.dense_us), t.speedup(t.unfused_us));
    out += fmt::format("{},{:.3f},{:.3f},{:.3f},{:.3f},{}\n", t.bytes, t.stream_us, t.cublas_us,
                       t.dense_us, t.unfused_us, bench::CsvField(t.plan));
  }
  return out;
}

std::string Times(double ratio) { return ratio > 0 ? fmt::format("{:.2f}x", ratio) : "-"; }

void PrintTiming(const KernelTiming& t) {
  fmt::print("{:>12}  {:>3}  {:>6.2f}%  {:>8.2f}  {:>6.0f}  {:>8.1f}%  {:>8}  {:>10}  {:>9}  {}\n",
             fmt::format("{}x{}", t.shape.k, t.shape.n), t.m, 100 * t.density, t.us, t.gb_per_s(),
             100 * t.stream_share(), Times(t.speedup(t.cublas_us)), Times(t.speedup(t.dense_us)),
             Times(t.speedup(t.unfused_us)), t.plan);
  std::fflush(stdout);
}

void PrintMeans(const KernelBenchOptions& options, const std::vector<KernelTiming>& timings) {
  fmt::print("\ngeometric means   vs cuBLAS  vs dense only  vs unfused\n");
  for (const int m : options.ms) {
    for (const double density : options.densities) {
      std::vector<double> cublas;
      std::vector<double> dense;
      std::vector<double> unfused;
      for (const KernelTiming& t : timings) {
        if (t.m != m || t.density != density) continue;
        cublas.push_back(t.speedup(t.cublas_us));
        dense.push_back(t.speedup(t.dense_us));
        unfused.push_back(t.speedup(t.unfused_us));
      }
      fmt::print("M {:>3}, {:>6.2f}%   {:>9}  {:>13}  {:>10}\n", m, 100 * density,
                 Times(bench::GeometricMean(cublas)), Times(bench::GeometricMean(dense)),
                 Times(bench::GeometricMean(unfused)));
    }
  }
}

absl::Status RunTable(const KernelBenchOptions& options, const Flags& flags) {
  std::string device;
  std::string error;
  if (!bench::DescribeBenchDevice(&device, &error)) return UnavailableError("{}", error);
  fmt::print("{}\ncold L2, CUDA-graph replay, medians; stream: a read of as many bytes\n\n",
             device);
  fmt::print(
      "       K x N    M  outliers        us    GB/s  of stream  v cuBLAS  v dense only  "
      "v unfused  plan\n");
  std::vector<KernelTiming> timings;
  const auto row = [&](const KernelTiming& timing) {
    timings.push_back(timing);
    PrintTiming(timing);
  };
  if (!bench::TimeKernels(options, row, &error)) return UnavailableError("{}", error);
  PrintMeans(options, timings);
  return flags.csv.empty() ? absl::OkStatus() : WriteText(flags.csv, CsvOf(timings));
}

absl::Status RunFigure(const bench::FigureOptions& options, const Flags& flags) {
  FQ_ASSIGN_OR_RETURN(const std::vector<Figure> figures,
                      bench::MakePaperFigure(flags.figure, options));
  for (const Figure& figure : figures) fmt::print("{}\n", bench::FigureTable(figure));
  if (!flags.csv.empty()) FQ_RETURN_IF_ERROR(WriteText(flags.csv, bench::FigureCsv(figures)));
  if (!flags.plot.empty()) FQ_RETURN_IF_ERROR(WriteText(flags.plot, bench::FigureSvg(figures)));
  return absl::OkStatus();
}

absl::Status CheckFlags(const Flags& flags) {
  for (const int m : flags.ms) {
    if (m < 1 || m > bench::kMaxRows) {
      return InvalidArgumentError("--m {}; 1 to {}", m, bench::kMaxRows);
    }
  }
  for (const double density : flags.densities) {
    if (!(density >= 0 && density <= kMaxDensity)) {
      return InvalidArgumentError("--density {}; 0 to {}", density, kMaxDensity);
    }
  }
  if (!flags.plot.empty() && flags.figure == 0) {
    return InvalidArgumentError("--plot draws a figure; it needs --figure");
  }
  const bool timed = flags.figure == 0 || flags.figure == 7 || flags.figure == 8;
  if (flags.path != "auto" && !timed) {
    return InvalidArgumentError("--path {}: figure {} {}", flags.path, flags.figure,
                                flags.figure == 11 ? "goes through the paths itself" : "runs none");
  }
  if (flags.shared_kb != 0 && !timed && flags.figure != 11) {
    return InvalidArgumentError("--smem {}: figure {} runs no kernel", flags.shared_kb,
                                flags.figure);
  }
  FQ_RETURN_IF_ERROR(CheckWritable(flags.csv));
  return CheckWritable(flags.plot);
}

bench::WeightCopies CopiesOf(const Flags& flags) {
  return flags.path == "bulk"   ? bench::WeightCopies::kBulk
         : flags.path == "sm80" ? bench::WeightCopies::kCpAsync
                                : bench::WeightCopies::kAuto;
}

absl::Status RunBenchKernel(const Flags& flags) {
  FQ_RETURN_IF_ERROR(CheckFlags(flags));
  FQ_ASSIGN_OR_RETURN(const std::vector<KernelShape> shapes, ParseKernelShapes(flags.shapes));
  if (flags.figure != 0) {
    bench::FigureOptions options;
    options.shapes = shapes;
    options.ms = flags.ms;
    options.densities = flags.densities;
    options.num_threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    options.copies = CopiesOf(flags);
    options.shared_kb = flags.shared_kb;
    std::error_code error;
    options.program = std::filesystem::read_symlink("/proc/self/exe", error).string();
    return RunFigure(options, flags);
  }
  KernelBenchOptions options;
  if (!shapes.empty()) options.shapes = shapes;
  options.ms = flags.ms.empty() ? std::vector<int>{1, 2, 4, 8, 16, 32} : flags.ms;
  if (!flags.densities.empty()) options.densities = flags.densities;
  options.cublas = !flags.no_baselines;
  options.unfused = !flags.no_baselines;
  options.copies = CopiesOf(flags);
  options.shared_kb = flags.shared_kb;
  return RunTable(options, flags);
}

}  // namespace

void AddBenchCommand(CLI::App& app, int* exit_code) {
  CLI::App* bench = app.add_subcommand("bench", "Measure kernels or the engine on this machine");
  bench->require_subcommand(1);
  AddBenchEngineCommand(*bench, exit_code);
  AddBenchTuneCommand(*bench, exit_code);
  auto flags = std::make_shared<Flags>();
  CLI::App* command = bench->add_subcommand(
      "kernel",
      "Time the fused INT4 + outlier kernel on this GPU (cold L2, CUDA graphs, medians) against a "
      "streaming read, cuBLAS BF16, the kernel without outliers, and that kernel followed by "
      "cuSPARSE; or make one of the paper's figures for this machine");
  command->add_option("--shapes", flags->shapes,
                      "KxN,KxN,... or a file with one KxN a line; default: seven shapes of "
                      "current models, or those of the figure");
  command->add_option("--m", flags->ms, "rows; default 1,2,4,8,16,32")->delimiter(',');
  command
      ->add_option("--density", flags->densities,
                   "stored outlier slots per weight; default 0,0.01,0.03")
      ->delimiter(',');
  command->add_option("--csv", flags->csv, "also write the numbers to this file");
  command
      ->add_option(
          "--figure", flags->figure,
          "7 speedup by outliers, 8 speedup by rows, 9 preprocessing time, 10 storage, "
          "11 ablation of the paper's mapping and of this kernel, 12 memory traffic (9, 10 and 12 "
          "need no GPU)")
      ->check(CLI::Range(bench::kFirstPaperFigure, bench::kLastPaperFigure));
  command->add_flag("--no-baselines", flags->no_baselines,
                    "only the kernel itself and the streaming read; not for figures");
  command->add_option("--plot", flags->plot, "draw the figure to this SVG file");
  command
      ->add_option("--path", flags->path,
                   "how weights are copied: auto, bulk (compute capability 9.0) or sm80 (cp.async)")
      ->check(CLI::IsMember({"auto", "bulk", "sm80"}));
  command->add_option("--smem", flags->shared_kb, "shared memory a block may use, KB; 0: all")
      ->check(CLI::Range(0, 1024));
  command->callback(
      [flags, exit_code] { *exit_code = RunTool([&] { return RunBenchKernel(*flags); }); });
}

}  // namespace flashquant
