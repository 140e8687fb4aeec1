// The measurements behind the paper's figures 7 to 12, for this machine and these kernels (design
// "kernel" 12). Figures 9, 10 and 12 need no GPU: 9 times the host, 10 and 12 count bytes, 12 beside
// the profiler's count where there is one.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/bench/figure.h"
#include "kernels/bench/kernel_bench.h"

namespace flashquant::bench {

struct FigureOptions {
  // Empty: those of the figure.
  std::vector<KernelShape> shapes;
  std::vector<int> ms;
  std::vector<double> densities;
  int num_threads = 1;  // for packing in figure 9
  // This program, run under ncu for figure 12 where ncu is there; empty: never.
  std::string program;
  // What the kernel may use in figures 7 and 8; the shared memory in 11 too, whose steps choose
  // their copies.
  WeightCopies copies = WeightCopies::kAuto;
  int shared_kb = 0;  // of a block; 0: what the device has
};

inline constexpr int kFirstPaperFigure = 7;
inline constexpr int kLastPaperFigure = 12;

// Figure 7 is one per number of rows, 8 one per density; 11 and 12 are for one number of rows, 11
// for the paper's mapping and for this project's kernel, 12 in MB and in percent. INVALID_ARGUMENT
// for another number, or more shapes than the figure has room for; UNAVAILABLE without a GPU or
// CUDA for 7, 8 and 11.
absl::StatusOr<std::vector<Figure>> MakePaperFigure(int number, const FigureOptions& options);

}  // namespace flashquant::bench
