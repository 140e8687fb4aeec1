// Times of the fused linear kernel, its baselines and a streaming read on this machine's GPU:
// cold L2 (copies of the weight in turn over 256 MB), CUDA-graph replay, medians. Plain C++ without
// Abseil, so that the stand-alone program (tests/gpu/linear_w4a16_bench.cu) and the command
// `flashquant bench kernel` share it. A build without CUDA links kernel_bench_none.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/linear_w4a16/plan.h"

namespace flashquant::bench {

struct KernelShape {
  int k = 0;
  int n = 0;
};

// The shapes of the paper's models, query, key and value or gate and up joined.
std::vector<KernelShape> DefaultKernelShapes();

enum class WeightCopies : uint8_t { kAuto, kBulk, kCpAsync };

// A plan as a sweep makes them, the splits being those that fill the device.
struct SweptPlan {
  int ranks = 0;  // 0: none
  bool cluster = false;
  int warps = 0;
};

struct KernelBenchOptions {
  std::vector<KernelShape> shapes = DefaultKernelShapes();  // multiples of 8
  std::vector<int> ms = {8, 16, 32};                        // 1 to kMaxRows
  std::vector<double> densities = {0.0, 0.01, 0.03};        // stored slots / (k * n)
  bool cublas = true;                                       // BF16
  bool unfused = false;  // dense-only INT4, and cuSPARSE after it

  // What the kernel may use; all of it by default.
  WeightCopies copies = WeightCopies::kAuto;
  int shared_kb = 0;         // of a block; 0: what the device has
  bool clusters = true;      // that join their blocks' sums
  bool programmatic = true;  // dependent launch
  bool bank_order = true;    // of outlier slots; false: by position
  bool sweep = false;        // many plans instead of the planner's, of passes whatever m
  bool print_sweep = true;   // each of them
  SweptPlan only;            // with sweep: this one alone
};

inline constexpr int kMaxRows = 128;

// Microseconds; 0: not measured or not possible here.
struct KernelTiming {
  KernelShape shape;
  int m = 0;
  double density = 0;
  int64_t bytes = 0;  // of the packed weight
  double us = 0;
  double stream_us = 0;   // reading as many bytes
  double cublas_us = 0;   // best algorithm of cuBLAS and cuBLASLt
  double dense_us = 0;    // this kernel without outliers
  double unfused_us = 0;  // the same, then cuSPARSE adds the outliers
  std::string plan;
  cuda::LinearPlan best;  // the same
  int num_sms = 0;

  double gb_per_s() const { return us == 0 ? 0 : static_cast<double>(bytes) / us * 1e-3; }
  double stream_share() const { return us == 0 ? 0 : stream_us / us; }
  // How many times faster than `baseline_us`; 0 when either is missing.
  double speedup(double baseline_us) const { return us == 0 ? 0 : baseline_us / us; }
};

// One line about the GPU. False, with the reason, where there is none or no CUDA in this build.
bool DescribeBenchDevice(std::string* description, std::string* error);

// Calls `row` for every shape, density and m, in this order, as soon as it is measured. False, with
// the first error, when something failed; rows before it were delivered.
bool TimeKernels(const KernelBenchOptions& options,
                 const std::function<void(const KernelTiming&)>& row, std::string* error);

// Geometric mean of the positive ones of `values`; 0 without any.
double GeometricMean(const std::vector<double>& values);

}  // namespace flashquant::bench
