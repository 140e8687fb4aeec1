// Figures 9, 10 and 12 (paper_figures.h): what needs no GPU, though 12 asks the profiler when there
// is one.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/bench/figure_parts.h"
#include "kernels/bench/linear_problem.h"
#include "kernels/bench/profiled_traffic.h"
#include "kernels/cuda/linear_w4a16/pack.h"
#include "kernels/cuda/linear_w4a16/pack_rules.h"
#include "kernels/format/tile_coo_encoder.h"
#include "kernels/format/tile_coo_file.h"
#include "kernels/format/tile_coo_statistics.h"

namespace flashquant::bench {
namespace {

double Millions(int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

std::vector<TileCooSlot> SlotsOf(const Problem& problem) {
  std::vector<TileCooSlot> slots;
  const int64_t tiles_k = (problem.spec.k + problem.spec.tile_k - 1) / problem.spec.tile_k;
  for (size_t tile = 0; tile + 1 < problem.tile_indptr.size(); ++tile) {
    for (size_t r = problem.tile_indptr[tile]; r < problem.tile_indptr[tile + 1]; ++r) {
      const uint8_t* record = problem.records.data() + r * 16;
      for (size_t s = 0; s < 4; ++s) {
        TileCooSlot slot;
        std::memcpy(&slot.value_bits, record + 8 + 2 * s, 2);
        if (slot.value_bits == 0) continue;
        const auto t = static_cast<int64_t>(tile);
        slot.k = static_cast<int32_t>(t % tiles_k * problem.spec.tile_k + record[s]);
        slot.n = static_cast<int32_t>(t / tiles_k * problem.spec.tile_n + record[4 + s]);
        slots.push_back(slot);
      }
    }
  }
  return slots;
}

TileCooGeometry GeometryOf(const KernelShape& shape) {
  TileCooGeometry geometry;
  geometry.k = shape.k;
  geometry.n = shape.n;
  return geometry;
}

Problem ProblemOf(const KernelShape& shape, double density, int num_threads) {
  ProblemSpec spec;
  spec.k = shape.k;
  spec.n = shape.n;
  spec.density = density;
  return MakeProblem(spec, num_threads);
}

template <typename Work>
double Seconds(Work&& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

absl::StatusOr<Figures> Preprocessing(const FigureOptions& options) {
  Figure figure{"Figure 9: preprocessing time of a matrix",
                "matrix, outliers",
                "seconds",
                {},
                {{"encode Tile-COO", {}}, {"pack for the GPU kernel", {}}},
                {fmt::format("Encoding uses one thread, packing {}. Choosing outliers and "
                             "quantizing are not in it.",
                             options.num_threads)}};
  for (const KernelShape& shape :
       Or(options.shapes, {{4096, 4096}, {4096, 14336}, {14336, 4096}})) {
    for (const double density : Or(options.densities, {0.01, 0.02, 0.03})) {
      const Problem problem = ProblemOf(shape, density, options.num_threads);
      const std::vector<TileCooSlot> slots = SlotsOf(problem);
      absl::Status status;
      figure.series[0].values.push_back(
          Seconds([&] { status = EncodeTileCoo(GeometryOf(shape), slots).status(); }));
      FQ_RETURN_IF_ERROR(status);
      figure.series[1].values.push_back(Seconds(
          [&] { cuda::PackLinear(problem.weight(), problem.outliers(), options.num_threads); }));
      figure.x.push_back(
          fmt::format("{} {} ({})", ShapeText(shape), PercentText(density), slots.size()));
    }
  }
  return std::vector<Figure>{std::move(figure)};
}

namespace {

// So many outliers anywhere, not in groups of a column.
std::vector<TileCooSlot> ScatteredSlots(const KernelShape& shape, double density) {
  std::vector<TileCooSlot> slots;
  Random random(3);
  for (int n = 0; n < shape.n; ++n) {
    for (int k = 0; k < shape.k; ++k) {
      if (double{random.Uniform()} < density) slots.push_back({k, n, 0x3f80, false});
    }
  }
  return slots;
}

absl::StatusOr<int64_t> FileBytes(const KernelShape& shape, std::span<const TileCooSlot> slots) {
  FQ_ASSIGN_OR_RETURN(EncodedTileCoo encoded, EncodeTileCoo(GeometryOf(shape), slots));
  FQ_ASSIGN_OR_RETURN(const TileCooMatrix matrix,
                      TileCooMatrix::Create(GeometryOf(shape), std::move(encoded.arrays)));
  FQ_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes,
                      SerializeTileCooFile(matrix, encoded.counts, 0));
  return static_cast<int64_t>(bytes.size());
}

// Row offsets of 4 bytes, and for each outlier a column of 4 and a value of 2.
int64_t CsrBytes(const KernelShape& shape, int64_t num_outliers) {
  return 4 * (int64_t{shape.n} + 1) + 6 * num_outliers;
}

}  // namespace

absl::StatusOr<Figures> Storage(const FigureOptions& options) {
  FQ_ASSIGN_OR_RETURN(const KernelShape shape, OnlyShape(options, {4096, 4096}));
  const std::vector<double> densities = Or(options.densities, {0.01, 0.015, 0.02, 0.025, 0.03});
  Figure figure{
      fmt::format("Figure 10: storage of the outliers, {}", ShapeText(shape)),
      "outliers",
      "% of the dense BF16 matrix",
      PercentTexts(densities),
      {{"Tile-COO, formula", {}},
       {"Tile-COO file, groups of 4", {}},
       {"Tile-COO file, scattered", {}},
       {"CSR", {}}},
      {"Groups of 4: four outliers to a column of a tile; scattered: anywhere, records padded."}};
  const TileCooGeometry geometry = GeometryOf(shape);
  const double weights = static_cast<double>(shape.k) * shape.n;
  const auto percent = [&](int64_t bytes) {
    return 100 * static_cast<double>(bytes) / (2 * weights);
  };
  for (const double density : densities) {
    const auto slots = static_cast<int64_t>(std::llround(density * weights));
    FQ_ASSIGN_OR_RETURN(const int64_t grouped,
                        FileBytes(shape, SlotsOf(ProblemOf(shape, density, options.num_threads))));
    FQ_ASSIGN_OR_RETURN(const int64_t scattered, FileBytes(shape, ScatteredSlots(shape, density)));
    figure.series[0].values.push_back(
        percent(PaperStorageBytes(geometry.num_tiles(), geometry.buckets_per_tile, slots)));
    figure.series[1].values.push_back(percent(grouped));
    figure.series[2].values.push_back(percent(scattered));
    figure.series[3].values.push_back(percent(CsrBytes(shape, slots)));
  }
  return std::vector<Figure>{std::move(figure)};
}

namespace {

cuda::PackedLayout DenseLayoutOf(const KernelShape& shape) {
  cuda::Int4Arrays weight;
  weight.n = shape.n;
  weight.k = shape.k;
  weight.n_padded = (weight.n + 7) / 8 * 8;
  weight.k_padded = (weight.k + 127) / 128 * 128;
  weight.group_size = 128;
  return cuda::DenseLayout(weight);
}

}  // namespace

absl::StatusOr<Figures> Traffic(const FigureOptions& options) {
  FQ_ASSIGN_OR_RETURN(const KernelShape shape, OnlyShape(options, kLargestShape));
  const std::vector<int> ms = Or(options.ms, {16});
  if (ms.size() > 1) {
    return InvalidArgumentError("{} row counts; this figure is for one", ms.size());
  }
  const std::vector<double> densities = Or(options.densities, {0.01, 0.015, 0.02, 0.025, 0.03});
  const cuda::PackedLayout layout = DenseLayoutOf(shape);
  const int64_t units = int64_t{layout.num_strips} * layout.num_units;
  const int64_t x = 2 * int64_t{ms[0]} * shape.k;
  const int64_t y = 2 * int64_t{ms[0]} * shape.n;
  Figure figure{
      fmt::format("Figure 12: memory traffic, M = {}, {}", ms[0], ShapeText(shape)),
      "outliers",
      "MB, counted",
      PercentTexts(densities),
      {{"fused", {}}, {"dense only + CSR", {}}},
      {"Counted: weights, outliers and index once, x read and y written once by each kernel; the "
       "second kernel of the",
       "unfused pipeline reads y too. The fused kernel's units are taken to hold the mean number "
       "of outliers."}};
  Figure saved{
      fmt::format("Figure 12: memory traffic saved by fusing, M = {}, {}", ms[0], ShapeText(shape)),
      "outliers",
      "%",
      PercentTexts(densities),
      {{"of all traffic", {}}, {"of the sparse kernel's", {}}},
      {}};
  std::vector<double> profiled;
  for (const double density : densities) {
    const auto slots =
        std::llround(density * static_cast<double>(shape.k) * static_cast<double>(shape.n));
    const auto in_unit = static_cast<int>(std::lround(density * cuda::kUnitK * cuda::kStripN));
    const int64_t outliers = units * (int64_t{cuda::RecordBytes(in_unit)} +
                                      static_cast<int64_t>(sizeof(cuda::OutlierRef)));
    const int64_t sparse = CsrBytes(shape, slots) + x + 2 * y;
    const int64_t dense = layout.index_offset + x + y;
    const double fused = Millions(dense + outliers);
    const double unfused = Millions(dense + sparse);
    figure.series[0].values.push_back(fused);
    figure.series[1].values.push_back(unfused);
    saved.series[0].values.push_back(100 * (1 - fused / unfused));
    saved.series[1].values.push_back(100 * (1 - Millions(outliers) / Millions(sparse)));
    if (options.program.empty()) continue;
    const std::optional<int64_t> bytes = ProfiledTraffic(options.program, shape, ms[0], density);
    profiled.push_back(bytes.has_value() ? Millions(*bytes) : kMissing);
  }
  const auto is_number = [](double value) { return !std::isnan(value); };
  if (std::any_of(profiled.begin(), profiled.end(), is_number)) {
    figure.series.push_back({"fused, by ncu", std::move(profiled)});
  }
  return std::vector<Figure>{std::move(figure), std::move(saved)};
}

}  // namespace flashquant::bench
