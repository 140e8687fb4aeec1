// Error curves of all groups of a matrix, and the fit of one group of all rows inside GPTQ's pass.
// Half a warp a group, kThreads / 16 groups a block.
#include "kernels/cuda/quantize/quantizer_launchers.h"

#include "kernels/cuda/quantize/group_search.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kGroupsPerBlock = kThreads / kHalf;

template <int kPer>
__global__ void __launch_bounds__(kThreads) GroupCurvesKernel(CurveArguments a) {
  __shared__ GroupScratch<kPer> scratch[kGroupsPerBlock];
  const int64_t groups_per_row = (a.k + a.group_size - 1) / a.group_size;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kGroupsPerBlock + threadIdx.x / kHalf;
  if (index >= a.n * groups_per_row) return;
  const int64_t group = index % groups_per_row;
  const int64_t begin = group * a.group_size;
  const int count = static_cast<int>(min(static_cast<int64_t>(a.group_size), a.k - begin));
  const float* weights = a.weights + index / groups_per_row * a.k + begin;
  const float* importance = a.importance == nullptr ? nullptr : a.importance + begin;
  GroupSearch<kPer> search(
      &scratch[threadIdx.x / kHalf], count, a.symmetric, importance != nullptr, a.peak[group],
      [&](int i) { return weights[i]; },
      [&](int i) { return importance == nullptr ? 1.0f : importance[i]; });
  search.ErrorCurve(a.length);
  GroupParams params = search.params(0);
  const double error = search.Refine(0, &params);
  const double factor = a.group_factor == nullptr ? 1.0 : a.group_factor[group];
  const int64_t out = index * a.length;
  for (int j = search.lane(); j < a.length; j += kHalf) {
    double own = j == 0 ? error : search.error(j);
    if (isfinite(own)) own = fmin(own, error);
    a.errors[out + j] = static_cast<float>(factor * a.factor_scale * own);
    a.params[out + j] = j == 0 ? params : search.params(j);
  }
  if (search.lane() == 0) a.error_without[index] = factor * error;
}

template <int kPer>
__global__ void __launch_bounds__(kThreads) FitGroupKernel(FitArguments a) {
  __shared__ GroupScratch<kPer> scratch[kGroupsPerBlock];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kGroupsPerBlock + threadIdx.x / kHalf;
  if (row >= a.n) return;
  GroupSearch<kPer> search(
      &scratch[threadIdx.x / kHalf], a.count, a.symmetric, /*weighted=*/true, a.peak,
      [&](int i) {
        const float value = a.values[(a.place_of[i] - a.begin) * a.stride + row];
        return fabsf(value) <= kMaxWeightMagnitude ? value : 0.0f;
      },
      [&](int i) { return a.importance[i]; });
  const int outliers = a.outliers[row * a.groups_per_row];
  GroupParams params = a.params[row * a.groups_per_row];
  search.Refine(outliers, &params);
  const uint32_t chosen = search.LargestErrors(params, outliers);
  for (int v = 0; v < kPer; ++v) {
    const int i = v * kHalf + search.lane();
    if ((chosen >> v & 1u) != 0) a.mask[a.place_of[i] * a.stride + row] = 1;
  }
  __syncwarp(0xffffu << (threadIdx.x % 32 & kHalf));
  if (search.lane() == 0) a.params[row * a.groups_per_row] = params;
}

unsigned Blocks(int64_t groups) {
  return static_cast<unsigned>((groups + kGroupsPerBlock - 1) / kGroupsPerBlock);
}

}  // namespace

cudaError_t LaunchGroupCurves(const CurveArguments& arguments, cudaStream_t stream) {
  const int64_t groups_per_row = (arguments.k + arguments.group_size - 1) / arguments.group_size;
  const unsigned blocks = Blocks(arguments.n * groups_per_row);
  switch (arguments.group_size) {
    case 32:
      GroupCurvesKernel<2><<<blocks, kThreads, 0, stream>>>(arguments);
      break;
    case 64:
      GroupCurvesKernel<4><<<blocks, kThreads, 0, stream>>>(arguments);
      break;
    case 128:
      GroupCurvesKernel<8><<<blocks, kThreads, 0, stream>>>(arguments);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t LaunchFitGroup(const FitArguments& arguments, cudaStream_t stream) {
  const unsigned blocks = Blocks(arguments.n);
  switch (arguments.group_size) {
    case 32:
      FitGroupKernel<2><<<blocks, kThreads, 0, stream>>>(arguments);
      break;
    case 64:
      FitGroupKernel<4><<<blocks, kThreads, 0, stream>>>(arguments);
      break;
    case 128:
      FitGroupKernel<8><<<blocks, kThreads, 0, stream>>>(arguments);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace flashquant::cuda
