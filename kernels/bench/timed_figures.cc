// Figures 7, 8 and 11 (paper_figures.h): times on the GPU.
#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "kernels/bench/figure_parts.h"
#include "kernels/bench/paper_bench.h"

namespace flashquant::bench {
namespace {

absl::StatusOr<std::vector<KernelTiming>> Measure(const KernelBenchOptions& options) {
  std::vector<KernelTiming> timings;
  std::string device;
  std::string error;
  // Without one the libraries for comparison print lines of their own.
  if (!DescribeBenchDevice(&device, &error)) return UnavailableError("{}", error);
  if (!TimeKernels(
          options, [&](const KernelTiming& t) { timings.push_back(t); }, &error)) {
    return UnavailableError("{}", error);
  }
  return timings;
}

// Geometric mean over the shapes of `ratio` at one point; missing where there is none.
template <typename Ratio>
double MeanRatio(const std::vector<KernelTiming>& timings, int m, double density, Ratio&& ratio) {
  std::vector<double> ratios;
  for (const KernelTiming& t : timings) {
    if (t.m == m && t.density == density) ratios.push_back(ratio(t));
  }
  const double mean = GeometricMean(ratios);
  return mean > 0 ? mean : kMissing;
}

double Ratio(double a, double b) { return a > 0 && b > 0 ? a / b : 0; }

// The three lines of figures 7 and 8.
std::vector<FigureSeries> SpeedupSeries() {
  return {{"fused", {}}, {"dense only (no outliers)", {}}, {"dense only + cuSPARSE", {}}};
}

void AddSpeedups(const std::vector<KernelTiming>& timings, int m, double density,
                 std::vector<FigureSeries>& series) {
  series[0].values.push_back(MeanRatio(
      timings, m, density, [](const KernelTiming& t) { return Ratio(t.cublas_us, t.us); }));
  series[1].values.push_back(MeanRatio(
      timings, m, density, [](const KernelTiming& t) { return Ratio(t.cublas_us, t.dense_us); }));
  series[2].values.push_back(MeanRatio(
      timings, m, density, [](const KernelTiming& t) { return Ratio(t.cublas_us, t.unfused_us); }));
}

const char kDenseOnlyNote[] =
    "Dense only is this project's kernel on the weight without its outliers; it stands for the "
    "paper's Marlin.";

}  // namespace

absl::StatusOr<Figures> SpeedupByDensity(const FigureOptions& options) {
  KernelBenchOptions bench;
  bench.shapes = Or(options.shapes, DefaultKernelShapes());
  bench.ms = Or(options.ms, {8, 16});
  bench.densities = Or(options.densities, {0.01, 0.015, 0.02, 0.025, 0.03});
  bench.copies = options.copies;
  bench.shared_kb = options.shared_kb;
  bench.unfused = true;
  FQ_ASSIGN_OR_RETURN(const std::vector<KernelTiming> timings, Measure(bench));
  std::vector<Figure> figures;
  for (const int m : bench.ms) {
    Figure figure{fmt::format("Figure 7: speedup over cuBLAS BF16, M = {}", m),
                  "outliers",
                  fmt::format("times, geometric mean of {} shapes", bench.shapes.size()),
                  PercentTexts(bench.densities),
                  SpeedupSeries(),
                  {kDenseOnlyNote}};
    for (const double density : bench.densities) AddSpeedups(timings, m, density, figure.series);
    figures.push_back(std::move(figure));
  }
  return figures;
}

absl::StatusOr<Figures> SpeedupByRows(const FigureOptions& options) {
  KernelBenchOptions bench;
  FQ_ASSIGN_OR_RETURN(const KernelShape shape, OnlyShape(options, kLargestShape));
  bench.shapes = {shape};
  bench.ms = Or(options.ms, {1, 2, 4, 8, 16, 32});
  bench.densities = Or(options.densities, {0.03});
  bench.copies = options.copies;
  bench.shared_kb = options.shared_kb;
  bench.unfused = true;
  FQ_ASSIGN_OR_RETURN(const std::vector<KernelTiming> timings, Measure(bench));
  std::vector<Figure> figures;
  for (const double density : bench.densities) {
    Figure figure{fmt::format("Figure 8: speedup over cuBLAS BF16, {} at {}", ShapeText(shape),
                              PercentText(density)),
                  "M",
                  "times",
                  {},
                  SpeedupSeries(),
                  {kDenseOnlyNote}};
    for (const int m : bench.ms) {
      figure.x.push_back(std::to_string(m));
      AddSpeedups(timings, m, density, figure.series);
    }
    figures.push_back(std::move(figure));
  }
  return figures;
}

namespace {

// Each step has what the one before has, and more.
struct AblationStep {
  const char* name;
  void (*enable)(KernelBenchOptions& bench);
};

constexpr AblationStep kAblation[] = {
    {"fused", [](KernelBenchOptions&) {}},
    {"+ slot order", [](KernelBenchOptions& bench) { bench.bank_order = true; }},
    {"+ bulk copies", [](KernelBenchOptions& bench) { bench.copies = WeightCopies::kAuto; }},
    {"+ clusters", [](KernelBenchOptions& bench) { bench.clusters = true; }},
    {"+ dependent launch", [](KernelBenchOptions& bench) { bench.programmatic = true; }}};

constexpr std::array<const char*, kPaperSteps.size()> kPaperStepNames = {"tiling", "+ extra warps",
                                                                         "+ reordering"};

// A figure of the ablation without its series.
Figure AblationFigure(const char* whose, const KernelBenchOptions& bench,
                      std::vector<std::string> notes) {
  return {
      fmt::format("Figure 11: {}, speedup over dense only + cuSPARSE, M = {}", whose, bench.ms[0]),
      "outliers",
      fmt::format("times, geometric mean of {} shapes", bench.shapes.size()),
      PercentTexts(bench.densities),
      {},
      std::move(notes)};
}

// `timings` and `unfused`: of the same problems in the same order.
FigureSeries SpeedupOverUnfused(const char* name, std::vector<KernelTiming> timings,
                                const std::vector<KernelTiming>& unfused,
                                const KernelBenchOptions& bench) {
  for (size_t i = 0; i < std::min(timings.size(), unfused.size()); ++i) {
    timings[i].unfused_us = unfused[i].unfused_us;
  }
  FigureSeries series{name, {}};
  for (const double density : bench.densities) {
    series.values.push_back(MeanRatio(timings, bench.ms[0], density, [](const KernelTiming& t) {
      return Ratio(t.unfused_us, t.us);
    }));
  }
  return series;
}

absl::StatusOr<Figure> PaperAblation(const KernelBenchOptions& bench,
                                     const std::vector<KernelTiming>& unfused) {
  Figure figure = AblationFigure(
      "the paper's mapping", bench,
      {"Steps of the paper's mapping, built apart and not tuned: outliers on CUDA cores in the "
       "kernel and tiles of the codes;",
       "warps for outliers alone; columns and elements reordered."});
  std::array<std::vector<KernelTiming>, kPaperSteps.size()> timings;
  std::string error;
  const auto row = [&](PaperStep step, const KernelTiming& t) {
    timings[static_cast<size_t>(step)].push_back(t);
  };
  if (!TimePaperKernels(bench, row, &error)) return UnavailableError("{}", error);
  for (size_t i = 0; i < timings.size(); ++i) {
    figure.series.push_back(SpeedupOverUnfused(kPaperStepNames[i], timings[i], unfused, bench));
  }
  return figure;
}

absl::StatusOr<Figure> OwnAblation(KernelBenchOptions bench,
                                   const std::vector<KernelTiming>& unfused) {
  bench.bank_order = false;
  bench.copies = WeightCopies::kCpAsync;
  bench.clusters = false;
  bench.programmatic = false;
  Figure figure = AblationFigure(
      "this project's kernel", bench,
      {"Steps of this project's kernel: one launch for weights and outliers; slots ordered against "
       "bank conflicts;",
       "bulk copies, clusters and dependent launch where the card has them (compute capability 9.0 "
       "and later)."});
  for (const AblationStep& step : kAblation) {
    step.enable(bench);
    FQ_ASSIGN_OR_RETURN(std::vector<KernelTiming> timings, Measure(bench));
    figure.series.push_back(SpeedupOverUnfused(step.name, std::move(timings), unfused, bench));
  }
  return figure;
}

}  // namespace

absl::StatusOr<Figures> Ablation(const FigureOptions& options) {
  KernelBenchOptions bench;
  bench.shapes = Or(options.shapes, DefaultKernelShapes());
  bench.ms = Or(options.ms, {8});
  if (bench.ms.size() > 1) {
    return InvalidArgumentError("{} row counts; this figure is for one", bench.ms.size());
  }
  bench.densities = Or(options.densities, {0.01, 0.02, 0.03});
  bench.shared_kb = options.shared_kb;
  bench.cublas = false;
  bench.unfused = true;
  FQ_ASSIGN_OR_RETURN(const std::vector<KernelTiming> unfused, Measure(bench));
  bench.unfused = false;
  FQ_ASSIGN_OR_RETURN(Figure paper, PaperAblation(bench, unfused));
  FQ_ASSIGN_OR_RETURN(Figure own, OwnAblation(bench, unfused));
  return std::vector<Figure>{std::move(paper), std::move(own)};
}

}  // namespace flashquant::bench
