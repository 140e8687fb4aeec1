// cuBLAS and cuBLASLt BF16 products as the baseline of the GPU benchmarks: y = x * W for W stored
// [N, K] (as checkpoints do) and [K, N], every algorithm that the libraries' heuristics offer.
// Opened at run time, so that the benchmarks build and run without them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

namespace flashquant::bench {

class CublasBaseline {
 public:
  CublasBaseline();
  ~CublasBaseline();

  // Number of algorithms for these sizes; 0 without the libraries. They are valid until the next
  // call.
  int Prepare(int k, int n, int m);
  // Queues one product. weight: k * n BF16, x: [m, k], y: [m, n]. False when it cannot run.
  bool Run(int algorithm, const void* weight, const void* x, void* y, cudaStream_t stream);
  // `count` columns of y from `first` on, `weight` [count, K]: as the backend calls cuBLAS.
  bool RunColumns(int first, int count, const void* weight, const void* x, void* y,
                  cudaStream_t stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace flashquant::bench
