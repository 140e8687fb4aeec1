// cuSPARSE's sparse product as the unfused baseline of the GPU benchmarks: y += x * W_O for the
// outliers in CSR by output feature, BF16 values, 32-bit indices. Opened at run time, so that the
// benchmarks build and run without it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace flashquant::bench {

// Device pointers of one copy of a CsrMatrix.
struct CsrPointers {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t num_values = 0;
  int32_t* row_begin = nullptr;
  int32_t* column = nullptr;
  uint16_t* value = nullptr;
};

class CusparseBaseline {
 public:
  static constexpr int kNumAlgorithms = 3;

  CusparseBaseline();
  ~CusparseBaseline();

  bool available() const;
  // Prepares y [m, n] += x [m, k] * W_O for every copy with one algorithm. False when the library
  // cannot. Valid until the next call; x, y and the copies must live as long.
  bool Prepare(int algorithm, const std::vector<CsrPointers>& copies, int m, const void* x,
               void* y);
  // Queues the product with copy `i`.
  bool Run(int i, cudaStream_t stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace flashquant::bench
