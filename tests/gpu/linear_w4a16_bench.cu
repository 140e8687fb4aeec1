// Times of the fused linear kernel as a stand-alone program (kernels/bench/kernel_bench.h), for a
// machine with nvcc and nothing else. cuBLAS and cuSPARSE are opened at run time; without them
// their columns are empty. The plan is the planner's; with --sweep the best of many.
// Options: --shapes KxN,KxN  --m 8,16  --density 0,0.01,0.03  --path bulk|cp_async  --smem KB
//          --plan RANKSxWARPS or RANKScWARPS (joined in clusters)
//          --no-pdl  --no-clusters  --no-bank-order  --sweep  --no-cublas  --unfused
// --paper times the paper's own mapping step by step, --routes the ways for many rows, instead.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/bench/graph_timer.h"
#include "kernels/bench/kernel_bench.h"
#include "kernels/bench/paper_bench.h"
#include "kernels/bench/route_bench.h"

namespace flashquant::gpu_test {
namespace {

using bench::KernelBenchOptions;
using bench::KernelShape;
using bench::KernelTiming;

std::string Line(const KernelTiming& t) {
  char line[320];
  const int length = std::snprintf(
      line, sizeof(line),
      "%6dx%-6d %3d %5.1f%% | %8.2f %6.0f GB/s %5.1f%% of stream %8.2f | cuBLAS "
      "%8.2f %5.2fx | %s",
      t.shape.k, t.shape.n, t.m, t.density * 100, t.us, t.gb_per_s(), 100 * t.stream_share(),
      t.stream_us, t.cublas_us, t.speedup(t.cublas_us), t.plan.c_str());
  if (t.dense_us > 0) {
    std::snprintf(line + length, sizeof(line) - static_cast<size_t>(length),
                  " | dense only %.2f %.2fx, with cuSPARSE %.2f %.2fx", t.dense_us,
                  t.speedup(t.dense_us), t.unfused_us, t.speedup(t.unfused_us));
  }
  return line;
}

int Run(const KernelBenchOptions& options) {
  std::string device;
  std::string error;
  if (!bench::DescribeBenchDevice(&device, &error)) {
    std::fprintf(stderr, "%s\n", error.c_str());
    return 3;
  }
  std::printf("%s; times in us, cold L2, graph replay, medians of %d\n", device.c_str(),
              bench::kTimedReplays);
  std::vector<KernelTiming> table;
  const auto row = [&](const KernelTiming& timing) {
    table.push_back(timing);
    std::printf("%s\n", Line(timing).c_str());
    std::fflush(stdout);
  };
  const bool good = bench::TimeKernels(options, row, &error);
  std::printf("\n");
  for (const KernelTiming& timing : table) std::printf("%s\n", Line(timing).c_str());
  for (const int m : options.ms) {
    for (const double density : options.densities) {
      std::vector<double> ratios;
      for (const KernelTiming& t : table) {
        if (t.m == m && t.density == density) ratios.push_back(t.speedup(t.cublas_us));
      }
      std::printf("geometric mean vs cuBLAS, m %d, %.1f%%: %.2fx\n", m, density * 100,
                  bench::GeometricMean(ratios));
    }
  }
  if (!good) std::fprintf(stderr, "%s\n", error.c_str());
  return good ? 0 : 3;
}

int RunPaper(const KernelBenchOptions& options) {
  static const char* const kSteps[] = {"tiling", "+ extra warps", "+ reordering"};
  std::string error;
  const auto row = [](bench::PaperStep step, const KernelTiming& t) {
    std::printf("%6dx%-6d %3d %5.1f%% | %8.2f %6.0f GB/s | %s\n", t.shape.k, t.shape.n, t.m,
                t.density * 100, t.us, t.gb_per_s(), kSteps[static_cast<int>(step)]);
    std::fflush(stdout);
  };
  const bool good = bench::TimePaperKernels(options, row, &error);
  if (!good) std::fprintf(stderr, "%s\n", error.c_str());
  return good ? 0 : 3;
}

int RunRoutes(const KernelBenchOptions& options) {
  std::string error;
  const auto row = [](const bench::RouteTiming& t) {
    std::printf("%6dx%-6d %4d %5.1f%% | passes %9.2f many rows %9.2f unpack %9.2f cuBLAS %9.2f\n", t.shape.k,
                t.shape.n, t.m, t.density * 100, t.passes_us, t.many_rows_us, t.unpack_us, t.cublas_us);
    std::fflush(stdout);
  };
  const bool good = bench::TimeRoutes(options, row, &error);
  if (!good) std::fprintf(stderr, "%s\n", error.c_str());
  return good ? 0 : 3;
}

template <typename T, typename Parse>
std::vector<T> ParseList(const std::string& text, Parse&& parse) {
  std::vector<T> out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    out.push_back(parse(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return out;
}

bool ParseFlag(const std::string& name, KernelBenchOptions* options) {
  if (name == "--sweep") {
    options->sweep = true;
  } else if (name == "--no-cublas") {
    options->cublas = false;
  } else if (name == "--no-pdl") {
    options->programmatic = false;
  } else if (name == "--no-clusters") {
    options->clusters = false;
  } else if (name == "--no-bank-order") {
    options->bank_order = false;
  } else if (name == "--unfused") {
    options->unfused = true;
  } else {
    return false;
  }
  return true;
}

bool ParseValue(const std::string& name, const std::string& value, KernelBenchOptions* options) {
  if (name == "--shapes") {
    options->shapes = ParseList<KernelShape>(value, [](const std::string& s) {
      KernelShape shape;
      std::sscanf(s.c_str(), "%dx%d", &shape.k, &shape.n);
      return shape;
    });
  } else if (name == "--m") {
    options->ms = ParseList<int>(value, [](const std::string& s) { return std::atoi(s.c_str()); });
  } else if (name == "--density") {
    options->densities =
        ParseList<double>(value, [](const std::string& s) { return std::atof(s.c_str()); });
  } else if (name == "--path") {
    options->copies =
        value == "cp_async" ? bench::WeightCopies::kCpAsync : bench::WeightCopies::kBulk;
  } else if (name == "--smem") {
    options->shared_kb = std::atoi(value.c_str());
  } else if (name == "--plan") {
    char join = ' ';
    options->sweep = std::sscanf(value.c_str(), "%d%c%d", &options->only.ranks, &join,
                                 &options->only.warps) == 3;
    options->only.cluster = join == 'c';
    return options->sweep;
  } else {
    return false;
  }
  return true;
}

enum class Mode : uint8_t { kKernel, kPaper, kRoutes };

bool ParseOptions(int argc, char** argv, KernelBenchOptions* options, Mode* mode) {
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--paper") {
      *mode = Mode::kPaper;
      continue;
    }
    if (std::string(argv[i]) == "--routes") {
      *mode = Mode::kRoutes;
      options->ms = bench::DefaultRouteRows();
      continue;
    }
    if (ParseFlag(argv[i], options)) continue;
    if (i + 1 >= argc || !ParseValue(argv[i], argv[i + 1], options)) return false;
    ++i;
  }
  return true;
}

}  // namespace
}  // namespace flashquant::gpu_test

int main(int argc, char** argv) {
  using flashquant::gpu_test::Mode;
  flashquant::bench::KernelBenchOptions options;
  Mode mode = Mode::kKernel;
  if (!flashquant::gpu_test::ParseOptions(argc, argv, &options, &mode)) {
    std::fprintf(stderr, "unknown or incomplete option; see the head of the source file\n");
    return 2;
  }
  if (mode == Mode::kPaper) return flashquant::gpu_test::RunPaper(options);
  if (mode == Mode::kRoutes) return flashquant::gpu_test::RunRoutes(options);
  return flashquant::gpu_test::Run(options);
}
