// What the files of the paper's figures share; not for others.
#pragma once

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/status_macros.h"
#include "kernels/bench/figure.h"
#include "kernels/bench/kernel_bench.h"
#include "kernels/bench/paper_figures.h"

namespace flashquant::bench {

using Figures = std::vector<Figure>;

// Timed on the GPU (timed_figures.cc).
absl::StatusOr<Figures> SpeedupByDensity(const FigureOptions& options);  // 7
absl::StatusOr<Figures> SpeedupByRows(const FigureOptions& options);     // 8
absl::StatusOr<Figures> Ablation(const FigureOptions& options);          // 11

// Timed on the host, or counted (counted_figures.cc).
absl::StatusOr<Figures> Preprocessing(const FigureOptions& options);  // 9
absl::StatusOr<Figures> Storage(const FigureOptions& options);        // 10
absl::StatusOr<Figures> Traffic(const FigureOptions& options);        // 12

inline constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();
inline constexpr KernelShape kLargestShape = {14848, 75264};

template <typename T>
std::vector<T> Or(const std::vector<T>& chosen, std::vector<T> otherwise) {
  return chosen.empty() ? std::move(otherwise) : chosen;
}

inline std::string ShapeText(const KernelShape& shape) {
  return fmt::format("{}x{}", shape.k, shape.n);
}

inline std::string PercentText(double density) { return fmt::format("{:.3g}%", density * 100); }

inline std::vector<std::string> PercentTexts(const std::vector<double>& densities) {
  std::vector<std::string> out;
  out.reserve(densities.size());
  for (const double density : densities) out.push_back(PercentText(density));
  return out;
}

inline absl::StatusOr<KernelShape> OnlyShape(const FigureOptions& options,
                                             const KernelShape& otherwise) {
  if (options.shapes.size() > 1) {
    return InvalidArgumentError("{} shapes; this figure is for one", options.shapes.size());
  }
  return options.shapes.empty() ? otherwise : options.shapes[0];
}

}  // namespace flashquant::bench
