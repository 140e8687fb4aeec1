// The GPU tests' oracle: products in FP64 of a layer's exact matrix (Problem::DenseMatrix), by a
// kernel that shares nothing with those under test.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/gpu/device_layer.cuh"

namespace flashquant::gpu_test {

// y[m][n] = sum over k in double; one warp per (m, n).
__global__ void Fp64ProductKernel(const double* w, const uint16_t* x, double* y, int m_rows,
                                         int k, int n, int x_stride) {
  const int64_t index = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (index >= int64_t{m_rows} * n) return;
  const int m = static_cast<int>(index / n);
  const int64_t row = index % n;
  double sum = 0.0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < k; i += 32) {
    sum += w[row * k + i] *
           static_cast<double>(__uint_as_float(uint32_t{x[int64_t{m} * x_stride + i]} << 16));
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  if (threadIdx.x % 32 == 0) y[index] = sum;
}

// x: [m_rows, x_stride] BF16 bits on the device, w: [n, k].
inline std::vector<double> Fp64Product(const std::vector<double>& w, const uint16_t* x, int m_rows,
                                       int k, int n, int x_stride) {
  const DeviceArray<double> matrix(w);
  DeviceArray<double> y(static_cast<size_t>(m_rows) * static_cast<size_t>(n));
  const int64_t threads = int64_t{m_rows} * n * 32;
  Fp64ProductKernel<<<static_cast<unsigned>((threads + 255) / 256), 256>>>(matrix.get(), x, y.get(),
                                                                           m_rows, k, n, x_stride);
  FQ_CUDA_OK(cudaGetLastError());
  return y.ToHost();
}

}  // namespace flashquant::gpu_test
