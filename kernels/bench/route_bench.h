// Times of the ways to multiply many rows by an INT4 layer, from which the table of
// kernels/cuda/backend/linear_route.cc is made: passes of the fused kernel, the kernel for many
// rows, and unpacking the layer for cuBLAS; against cuBLAS on the same weight in BF16. Cold L2 and CUDA
// graphs as in kernel_bench.h. A build without CUDA links route_bench_none.cc.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/bench/kernel_bench.h"

namespace flashquant::bench {

// Microseconds; 0: not possible here.
struct RouteTiming {
  KernelShape shape;
  int m = 0;
  double density = 0;
  double passes_us = 0;  // up to kMaxFusedRows
  double many_rows_us = 0;  // the same
  double unpack_us = 0;
  double cublas_us = 0;  // best algorithm
};

inline constexpr int kMaxFusedRows = 512;  // more are never worth it
inline constexpr int kMaxRouteRows = 8192;

std::vector<int> DefaultRouteRows();

// Calls `row` for every shape, density and m of `options`, in this order. False, with the first
// error, when something failed.
bool TimeRoutes(const KernelBenchOptions& options,
                const std::function<void(const RouteTiming&)>& row, std::string* error);

}  // namespace flashquant::bench
