// Second moments of a layer's inputs and the Cholesky factor of their matrix: what cuBLAS does not
// do of it. All sums are in FP64 and in a fixed order.
#include "kernels/cuda/quantize/quantizer_launchers.h"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 32;
constexpr int kTileRows = 8;  // of threads

unsigned Blocks(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

// Blocks of kThreads over columns and rows of a [k, k] matrix.
dim3 MatrixGrid(int64_t k) { return {Blocks(k, kThreads), static_cast<unsigned>(k)}; }

__global__ void AddProductKernel(const float* product, int64_t k, double* moments) {
  const int64_t i = blockIdx.y;
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j < i || j >= k) return;
  moments[i * k + j] += static_cast<double>(product[i * k + j]);
}

// One tile of the lower half from the one across the diagonal.
__global__ void MirrorKernel(int64_t k, double* moments) {
  __shared__ double tile[kTile][kTile + 1];
  if (blockIdx.x < blockIdx.y) return;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTile;
  for (int i = threadIdx.y; i < kTile; i += kTileRows) {
    const int64_t r = row + i;
    const int64_t c = column + threadIdx.x;
    if (r < k && c < k) tile[i][threadIdx.x] = moments[r * k + c];
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kTile; i += kTileRows) {
    const int64_t r = column + i;
    const int64_t c = row + threadIdx.x;
    if (r < k && c < r) moments[r * k + c] = tile[threadIdx.x][i];
  }
}

__global__ void InspectMomentsKernel(const double* moments, int64_t k, double* diagonal,
                                     int32_t* bad) {
  const int64_t i = blockIdx.y;
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j < i || j >= k) return;
  const double value = moments[i * k + j];
  if (!isfinite(value)) *bad = 1;
  if (i == j) diagonal[i] = value;
}

__global__ void PlaceMomentsKernel(const double* moments, const int32_t* column_at, int64_t k,
                                   double damping, double* matrix, float* hessian) {
  const int64_t p = blockIdx.y;
  const int64_t q = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (q >= k) return;
  const int64_t a = column_at[p];
  const int64_t b = column_at[q];
  double value = moments[min(a, b) * k + max(a, b)];
  if (p == q) value += damping;
  matrix[p * k + q] = value;
  hessian[p * k + q] = static_cast<float>(value);
}

// One block. a[r][c], r >= c: the lower triangular factor L of the block; above the diagonal, by
// columns, the inverse of L without its own diagonal.
__global__ void __launch_bounds__(kThreads)
    CholeskyBlockKernel(double* matrix, int64_t k, int64_t begin, int count, double least_pivot,
                        double* inverse, int32_t* bad) {
  __shared__ double a[kCholeskyBlock][kCholeskyBlock + 1];
  double* block = matrix + begin * k + begin;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < count * count; i += kThreads) {
    const int p = i / count;
    const int q = i % count;
    if (q >= p) a[q][p] = block[p * k + q];
  }
  for (int c = 0; c < count; ++c) {
    __syncthreads();
    double pivot = a[c][c];
    if (!(pivot > least_pivot)) {
      if (thread == 0) *bad = 1;
      pivot = 1;
    }
    const double root = sqrt(pivot);
    __syncthreads();
    if (thread == 0) a[c][c] = root;
    for (int r = c + 1 + thread; r < count; r += kThreads) a[r][c] /= root;
    __syncthreads();
    const int left = count - c - 1;
    for (int i = thread; i < left * left; i += kThreads) {
      const int r = c + 1 + i / left;
      const int j = c + 1 + i % left;
      if (j <= r) a[r][j] -= a[r][c] * a[j][c];
    }
  }
  __syncthreads();
  for (int i = thread; i < count * count; i += kThreads) {
    const int p = i / count;
    const int q = i % count;
    if (q >= p) block[p * k + q] = a[q][p];
  }
  __syncthreads();
  // Column c of the inverse, each by one thread.
  for (int c = thread; c < count; c += kThreads) {
    const double first = 1.0 / a[c][c];
    for (int r = c + 1; r < count; ++r) {
      double sum = a[r][c] * first;
      for (int s = c + 1; s < r; ++s) sum += a[r][s] * a[c][s];
      a[c][r] = -sum / a[r][r];
    }
  }
  __syncthreads();
  for (int i = thread; i < count * kCholeskyBlock; i += kThreads) {
    const int r = i / kCholeskyBlock;
    const int c = i % kCholeskyBlock;
    inverse[i] = c > r || c >= count ? 0.0 : c == r ? 1.0 / a[r][r] : a[c][r];
  }
}

__global__ void CopyRowsKernel(const double* from, int64_t length, int64_t stride, double* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < length) to[blockIdx.y * stride + i] = from[blockIdx.y * length + i];
}

__global__ void PropagationKernel(const double* matrix, int64_t k, float* propagation,
                                  double* pivots) {
  const int64_t p = blockIdx.y;
  const int64_t q = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (q >= k) return;
  const double pivot = matrix[p * k + p];
  propagation[p * k + q] = q < p ? 0.0f : static_cast<float>(matrix[p * k + q] / pivot);
  if (p == q) pivots[p] = pivot;
}

__global__ void ToDoubleKernel(const float* from, int64_t count, double* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = static_cast<double>(from[i]);
}

__global__ void RowProductsKernel(const double* a, const double* b, int64_t k, double* sums) {
  __shared__ double parts[kThreads];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * k;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < k; i += kThreads) sum += a[first + i] * b[first + i];
  parts[threadIdx.x] = sum;
  for (int width = kThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) parts[threadIdx.x] += parts[threadIdx.x + width];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = parts[0];
}

}  // namespace

cudaError_t LaunchAddProduct(const float* product, int64_t k, double* moments,
                             cudaStream_t stream) {
  AddProductKernel<<<MatrixGrid(k), kThreads, 0, stream>>>(product, k, moments);
  return cudaGetLastError();
}

cudaError_t LaunchMirror(int64_t k, double* moments, cudaStream_t stream) {
  const dim3 grid(Blocks(k, kTile), Blocks(k, kTile));
  MirrorKernel<<<grid, dim3(kTile, kTileRows), 0, stream>>>(k, moments);
  return cudaGetLastError();
}

cudaError_t LaunchInspectMoments(const double* moments, int64_t k, double* diagonal, int32_t* bad,
                                 cudaStream_t stream) {
  InspectMomentsKernel<<<MatrixGrid(k), kThreads, 0, stream>>>(moments, k, diagonal, bad);
  return cudaGetLastError();
}

cudaError_t LaunchPlaceMoments(const double* moments, const int32_t* column_at, int64_t k,
                               double damping, double* matrix, float* hessian,
                               cudaStream_t stream) {
  PlaceMomentsKernel<<<MatrixGrid(k), kThreads, 0, stream>>>(moments, column_at, k, damping, matrix,
                                                             hessian);
  return cudaGetLastError();
}

cudaError_t LaunchCholeskyBlock(double* matrix, int64_t k, int64_t begin, int32_t count,
                                double least_pivot, double* inverse, int32_t* bad,
                                cudaStream_t stream) {
  CholeskyBlockKernel<<<1, kThreads, 0, stream>>>(matrix, k, begin, count, least_pivot, inverse,
                                                  bad);
  return cudaGetLastError();
}

cudaError_t LaunchCopyRows(const double* from, int32_t count, int64_t length, int64_t stride,
                           double* to, cudaStream_t stream) {
  const dim3 grid(Blocks(length, kThreads), static_cast<unsigned>(count));
  CopyRowsKernel<<<grid, kThreads, 0, stream>>>(from, length, stride, to);
  return cudaGetLastError();
}

cudaError_t LaunchPropagation(const double* matrix, int64_t k, float* propagation, double* pivots,
                              cudaStream_t stream) {
  PropagationKernel<<<MatrixGrid(k), kThreads, 0, stream>>>(matrix, k, propagation, pivots);
  return cudaGetLastError();
}

cudaError_t LaunchToDouble(const float* from, int64_t count, double* to, cudaStream_t stream) {
  ToDoubleKernel<<<Blocks(count, kThreads), kThreads, 0, stream>>>(from, count, to);
  return cudaGetLastError();
}

cudaError_t LaunchRowProducts(const double* a, const double* b, int64_t rows, int64_t k,
                              double* sums, cudaStream_t stream) {
  RowProductsKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(a, b, k, sums);
  return cudaGetLastError();
}

}  // namespace flashquant::cuda
