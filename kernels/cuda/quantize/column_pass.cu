// The passes over the columns of a matrix: GPTQ's own, and the sweeps of coordinate descent
// (engine/quantize/gptq_rows.cc says what they do and why).
//
// A row is independent of all others and belongs to four lanes, which share out its sums; a warp
// has eight rows, a block of kRowTile rows four warps. Columns follow each other, so what a step
// has found is in shared memory for the next; only lanes of one warp ever wait for each other.
#include "kernels/cuda/quantize/quantizer_launchers.h"
#include "kernels/cuda/quantize/rounding.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kLanesPerRow = 4;
constexpr int kThreads = kRowTile * kLanesPerRow;
// Of a row of a shared array: the eight rows and four lanes of a warp then fall on 32 banks.
constexpr int kPitch = kRowTile + 8;
constexpr unsigned kWarp = 0xffffffffu;
constexpr int kTile = 32;

__device__ __forceinline__ float SumOfLanes(float value) {
  value += __shfl_xor_sync(kWarp, value, 1);
  return value + __shfl_xor_sync(kWarp, value, 2);
}
__device__ __forceinline__ double SumOfLanes(double value) {
  value += __shfl_xor_sync(kWarp, value, 1);
  return value + __shfl_xor_sync(kWarp, value, 2);
}

// Sum over q from `first` to count - 1 of factors[q] * columns[q][row].
__device__ __forceinline__ float Propagated(const float* factors, const float (*columns)[kPitch],
                                            int first, int count, int row, int lane) {
  float sum = 0;
#pragma unroll 8
  for (int q = first + lane; q < count; q += kLanesPerRow) {
    sum = fmaf(__ldg(factors + q), columns[q][row], sum);
  }
  return SumOfLanes(sum);
}

struct Place {
  float weight = 0;
  float error = 0;
  bool is_outlier = false;
};

__device__ __forceinline__ Place LoadPlace(const RowsState& state, int64_t at, bool with_error) {
  Place place;
  place.weight = state.weights[at];
  place.is_outlier = state.mask[at] != 0;
  if (with_error) place.error = state.errors[at];
  return place;
}

__device__ __forceinline__ GroupParams ParamsOf(const RowsState& state, int64_t row, int group) {
  return row < state.n ? state.params[row * state.groups_per_row + group] : GroupParams();
}

// Grid: stride / kRowTile blocks of kThreads.
__global__ void __launch_bounds__(kThreads)
    ColumnPassKernel(RowsState state, int begin, int count, int group, const float* propagation,
                     const float* values) {
  // A place's compensated values; once it is done, its errors.
  __shared__ float columns[kMaxPassColumns][kPitch];
  const int lane = threadIdx.x % kLanesPerRow;
  const int r = threadIdx.x / kLanesPerRow;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowTile + r;
  for (int i = lane; i < count; i += kLanesPerRow) columns[i][r] = values[i * state.stride + row];
  const Levels levels = LevelsOf(ParamsOf(state, row, group));
  const float* factors = propagation + static_cast<int64_t>(begin) * state.k + begin;
  int64_t at = (begin + count - 1) * state.stride + row;
  Place next = LoadPlace(state, at, false);
  __syncwarp();
  for (int p = count - 1; p >= 0; --p, at -= state.stride) {
    const Place place = next;
    if (p > 0) next = LoadPlace(state, at - state.stride, false);
    const float value =
        columns[p][r] + Propagated(factors + p * state.k, columns, p + 1, count, r, lane);
    const float code = CodeOf(value, levels);
    const float rounded = place.is_outlier ? OutlierOf(value) : ValueOf(code, levels);
    const float error = __fadd_rn(place.weight, -rounded);
    __syncwarp();
    if (lane == 0) {
      columns[p][r] = error;
      state.errors[at] = error;
      state.codes[at] = static_cast<uint8_t>(static_cast<int>(code));
    }
    __syncwarp();
  }
}

// The step to the scale that is best for the codes as they are, 0 if there is none better.
__device__ __forceinline__ float ScaleStep(double slope, double curvature, GroupParams* params) {
  if (!(curvature > 0)) return 0.0f;
  const float scale = FloatOf(params->scale);
  const BFloat16 fitted =
      RoundToBFloat16(static_cast<float>(static_cast<double>(scale) + slope / curvature));
  const float step = __fadd_rn(FloatOf(fitted), -scale);
  // Rounded to BF16 it must still be a gain.
  const double gain =
      static_cast<double>(step) * (2 * slope - static_cast<double>(step) * curvature);
  if (!(FloatOf(fitted) > 0.0f) || !isfinite(FloatOf(fitted)) || !(gain > 0)) return 0.0f;
  params->scale = fitted;
  return step;
}

__device__ __forceinline__ float LevelOf(const RowsState& state, int64_t row, int64_t at,
                                         GroupParams params) {
  if (row >= state.n || state.mask[at] != 0) return 0.0f;
  return static_cast<float>(static_cast<int>(state.codes[at]) - static_cast<int>(params.zero));
}

// out[i][r] = sum over j of hessian[i, j] * levels[j][r], each lane every fourth i.
__device__ __forceinline__ void BlockProduct(const float* hessian, int64_t k,
                                             const float (*levels)[kPitch], int count, int r,
                                             int lane, float (*out)[kPitch]) {
  constexpr int kAtOnce = 4;
  for (int i = lane; i < count; i += kLanesPerRow * kAtOnce) {
    const float* rows[kAtOnce];
    float sum[kAtOnce] = {};
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) rows[u] = hessian + min(i + u * kLanesPerRow, count - 1) * k;
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
      const float level = levels[j][r];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) sum[u] = fmaf(__ldg(rows[u] + j), level, sum[u]);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (i + u * kLanesPerRow < count) out[i + u * kLanesPerRow][r] = sum[u];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    DescentKernel(RowsState state, int begin, int count, int group, bool refit,
                  const float* hessian, float* change) {
  // A place's level; once it is done, how the descent has changed its error.
  __shared__ float levels[kMaxPassColumns][kPitch];
  __shared__ float slopes[kMaxPassColumns][kPitch];
  const int lane = threadIdx.x % kLanesPerRow;
  const int r = threadIdx.x / kLanesPerRow;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowTile + r;
  const int64_t first = begin * state.stride + row;
  const float* block = hessian + static_cast<int64_t>(begin) * state.k + begin;
  GroupParams params = ParamsOf(state, row, group);
  float step = 0;
  for (int i = lane; i < count; i += kLanesPerRow) {
    levels[i][r] = refit ? LevelOf(state, row, first + i * state.stride, params) : 0.0f;
  }
  __syncwarp();
  if (refit) {
    BlockProduct(block, state.k, levels, count, r, lane, slopes);
    double slope = 0;
    double curvature = 0;
    for (int i = lane; i < count; i += kLanesPerRow) {
      const double level = static_cast<double>(levels[i][r]);
      slope += level * static_cast<double>(state.gradient[first + i * state.stride]);
      curvature += level * static_cast<double>(slopes[i][r]);
    }
    slope = SumOfLanes(slope);
    curvature = SumOfLanes(curvature);
    step = ScaleStep(slope, curvature, &params);
    if (lane == 0 && step != 0.0f) state.params[row * state.groups_per_row + group] = params;
  }
  for (int i = lane; i < count; i += kLanesPerRow) {
    const float gradient = state.gradient[first + i * state.stride];
    slopes[i][r] = step == 0.0f ? gradient : fmaf(-step, slopes[i][r], gradient);
  }
  const Levels grid = LevelsOf(params);
  int64_t at = first + (count - 1) * state.stride;
  Place next = LoadPlace(state, at, true);
  __syncwarp();
  for (int p = count - 1; p >= 0; --p, at -= state.stride) {
    const Place place = next;
    if (p > 0) next = LoadPlace(state, at - state.stride, true);
    const float moved = __fmul_rn(-step, levels[p][r]);  // by the scale
    const float before = __fadd_rn(place.error, moved);
    const float slope =
        slopes[p][r] + Propagated(block + p * state.k, levels, p + 1, count, r, lane);
    const float inverse = 1.0f / __ldg(block + p * state.k + p);
    const float wanted = __fadd_rn(__fadd_rn(place.weight, -before), __fmul_rn(slope, inverse));
    const float code = CodeOf(wanted, grid);
    const float rounded = place.is_outlier ? OutlierOf(wanted) : ValueOf(code, grid);
    const float error = __fadd_rn(place.weight, -rounded);
    const float inner = __fadd_rn(error, -before);
    __syncwarp();
    if (lane == 0) {
      levels[p][r] = inner;
      state.errors[at] = error;
      state.codes[at] = static_cast<uint8_t>(static_cast<int>(code));
      change[p * state.stride + row] = __fadd_rn(moved, inner);
    }
    __syncwarp();
  }
}

__global__ void LevelsKernel(RowsState state, float* levels) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= state.stride) return;
  const int64_t at = blockIdx.y * state.stride + row;
  levels[at] = LevelOf(state, row, at, ParamsOf(state, row, 0));
}

__global__ void RefitRowsKernel(RowsState state, const float* product, float* levels) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x;
  if (row >= state.stride) return;
  double slope = 0;
  double curvature = 0;
  for (int64_t at = row; at < state.k * state.stride; at += state.stride) {
    const double level = static_cast<double>(levels[at]);
    slope += level * static_cast<double>(state.gradient[at]);
    curvature += level * static_cast<double>(product[at]);
  }
  GroupParams params = ParamsOf(state, row, 0);
  const float step = ScaleStep(slope, curvature, &params);
  if (step != 0.0f) state.params[row] = params;
  for (int64_t at = row; at < state.k * state.stride; at += state.stride) {
    const float moved = __fmul_rn(-step, levels[at]);
    levels[at] = moved;
    state.errors[at] = __fadd_rn(state.errors[at], moved);
  }
}

// Block: kTile rows, as many strips of places.
__global__ void __launch_bounds__(kTile* kTile)
    RowSumsKernel(RowsState state, const float* moved, double damping, double* sums) {
  __shared__ double parts[kTile][kTile];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x;
  double totals[4] = {};
  for (int64_t place = threadIdx.y; place < state.k; place += kTile) {
    const int64_t at = place * state.stride + row;
    const double weight = static_cast<double>(state.weights[at]);
    const double error = static_cast<double>(state.errors[at]);
    totals[0] += weight * weight;
    totals[1] += error * error;
    totals[2] += weight * (static_cast<double>(moved[at]) - damping * weight);
    totals[3] += error * (static_cast<double>(state.gradient[at]) - damping * error);
  }
  for (int i = 0; i < 4; ++i) {
    __syncthreads();
    parts[threadIdx.y][threadIdx.x] = totals[i];
    __syncthreads();
    if (threadIdx.y != 0) continue;
    double sum = 0;
    for (int strip = 0; strip < kTile; ++strip) sum += parts[strip][threadIdx.x];
    sums[i * state.stride + row] = sum;
  }
}

// Tiles of kTile rows and columns, turned in shared memory so that both sides are read and written
// along their rows.
template <typename T>
__global__ void __launch_bounds__(kTile* kTile)
    ToPlacesKernel(const T* in, const int32_t* place_of, int64_t n, int64_t k, int64_t stride,
                   T* out) {
  __shared__ T tile[kTile][kTile + 1];
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTile;
  const int64_t from_row = row + threadIdx.y;
  const int64_t from_column = column + threadIdx.x;
  tile[threadIdx.y][threadIdx.x] =
      from_row < n && from_column < k ? in[from_row * k + from_column] : T{};
  __syncthreads();
  if (column + threadIdx.y >= k || row + threadIdx.x >= stride) return;
  out[place_of[column + threadIdx.y] * stride + row + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}

__global__ void __launch_bounds__(kTile* kTile)
    ToColumnsKernel(RowsState state, const int32_t* place_of, uint8_t* codes, float* values) {
  __shared__ float tile_values[kTile][kTile + 1];
  __shared__ uint8_t tile_codes[kTile][kTile + 4];
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTile;
  if (column + threadIdx.y < state.k) {
    const int64_t at = place_of[column + threadIdx.y] * state.stride + row + threadIdx.x;
    tile_values[threadIdx.y][threadIdx.x] = __fadd_rn(state.weights[at], -state.errors[at]);
    tile_codes[threadIdx.y][threadIdx.x] = state.mask[at] != 0 ? kMarkedCode : state.codes[at];
  }
  __syncthreads();
  const int64_t to_row = row + threadIdx.y;
  const int64_t to_column = column + threadIdx.x;
  if (to_row >= state.n || to_column >= state.k) return;
  const int64_t to = to_row * state.k + to_column;
  codes[to] = tile_codes[threadIdx.x][threadIdx.y];
  values[to] = tile_values[threadIdx.x][threadIdx.y];
}

// A warp a row.
__global__ void __launch_bounds__(kThreads)
    OutliersKernel(const uint8_t* codes, const float* values, int64_t n, int64_t k, int32_t* counts,
                   const int64_t* first, BFloat16* outliers) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kTile;
  if (row >= n) return;
  const int lane = threadIdx.x % kTile;
  int64_t next = first != nullptr ? first[row] : 0;
  for (int64_t begin = 0; begin < k; begin += kTile) {
    const int64_t at = row * k + begin + lane;
    const bool marked = begin + lane < k && codes[at] == kMarkedCode;
    const unsigned all = __ballot_sync(kWarp, marked);
    if (marked && first != nullptr) {
      outliers[next + __popc(all & ((1u << lane) - 1))] = RoundToBFloat16(values[at]);
    }
    next += __popc(all);
  }
  if (lane == 0 && first == nullptr) counts[row] = static_cast<int32_t>(next);
}

dim3 TileGrid(int64_t k, int64_t stride) {
  return {static_cast<unsigned>((k + kTile - 1) / kTile), static_cast<unsigned>(stride / kTile)};
}

unsigned RowBlocks(const RowsState& state) {
  return static_cast<unsigned>(state.stride / kRowTile);
}

template <typename T>
cudaError_t LaunchToPlacesOf(const T* in, const int32_t* place_of, int64_t n, int64_t k,
                             int64_t stride, T* out, cudaStream_t stream) {
  ToPlacesKernel<T>
      <<<TileGrid(k, stride), dim3(kTile, kTile), 0, stream>>>(in, place_of, n, k, stride, out);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchToPlaces(const float* in, const int32_t* place_of, int64_t n, int64_t k,
                           int64_t stride, float* out, cudaStream_t stream) {
  return LaunchToPlacesOf(in, place_of, n, k, stride, out, stream);
}

cudaError_t LaunchToPlaces(const uint8_t* in, const int32_t* place_of, int64_t n, int64_t k,
                           int64_t stride, uint8_t* out, cudaStream_t stream) {
  return LaunchToPlacesOf(in, place_of, n, k, stride, out, stream);
}

cudaError_t LaunchToColumns(const RowsState& state, const int32_t* place_of, uint8_t* codes,
                            float* values, cudaStream_t stream) {
  ToColumnsKernel<<<TileGrid(state.k, state.stride), dim3(kTile, kTile), 0, stream>>>(
      state, place_of, codes, values);
  return cudaGetLastError();
}

cudaError_t LaunchOutliers(const uint8_t* codes, const float* values, int64_t n, int64_t k,
                           int32_t* counts, const int64_t* first, BFloat16* outliers,
                           cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((n * kTile + kThreads - 1) / kThreads);
  OutliersKernel<<<blocks, kThreads, 0, stream>>>(codes, values, n, k, counts, first, outliers);
  return cudaGetLastError();
}

cudaError_t LaunchColumnPass(const RowsState& state, int32_t begin, int32_t count, int32_t group,
                             const float* propagation, const float* values, cudaStream_t stream) {
  ColumnPassKernel<<<RowBlocks(state), kThreads, 0, stream>>>(state, begin, count, group,
                                                              propagation, values);
  return cudaGetLastError();
}

cudaError_t LaunchDescent(const RowsState& state, int32_t begin, int32_t count, int32_t group,
                          bool refit, const float* hessian, float* change, cudaStream_t stream) {
  DescentKernel<<<RowBlocks(state), kThreads, 0, stream>>>(state, begin, count, group, refit,
                                                           hessian, change);
  return cudaGetLastError();
}

cudaError_t LaunchLevels(const RowsState& state, float* levels, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((state.stride + kThreads - 1) / kThreads),
                  static_cast<unsigned>(state.k));
  LevelsKernel<<<grid, kThreads, 0, stream>>>(state, levels);
  return cudaGetLastError();
}

cudaError_t LaunchRefitRows(const RowsState& state, const float* product, float* levels,
                            cudaStream_t stream) {
  RefitRowsKernel<<<RowBlocks(state), kTile, 0, stream>>>(state, product, levels);
  return cudaGetLastError();
}

cudaError_t LaunchRowSums(const RowsState& state, const float* moved, double damping, double* sums,
                          cudaStream_t stream) {
  RowSumsKernel<<<RowBlocks(state), dim3(kTile, kTile), 0, stream>>>(state, moved, damping, sums);
  return cudaGetLastError();
}

}  // namespace flashquant::cuda
