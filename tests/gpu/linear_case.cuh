// What the GPU tests of the fused linear kernels share: a problem on the device with its products
// in FP64 (fp64_product.cuh), launches checked against them with poisoned outputs and workspaces,
// and the checks that hold for any of these kernels. `launch` is a function of the parameters.
#pragma once

#include <string>
#include <thread>
#include <vector>

#include "kernels/bench/linear_problem.h"
#include "tests/gpu/device_layer.cuh"
#include "tests/gpu/fp64_product.cuh"
#include "tests/gpu/output_check.h"

namespace flashquant::gpu_test {

inline int HostThreads() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// One problem, for up to `max_m` rows.
class LinearCase {
 public:
  LinearCase(const bench::ProblemSpec& spec, int max_m)
      : max_m_(max_m),
        problem_(MakeProblem(spec, HostThreads())),
        packed_(cuda::PackLinear(problem_.weight(), problem_.outliers(), HostThreads())),
        weight_(packed_.bytes),
        x_stride_(spec.k + 8),
        y_stride_(spec.n + kGuard) {
    bench::Random random(spec.seed + 99);
    std::vector<uint16_t> x(static_cast<size_t>(max_m) * static_cast<size_t>(x_stride_), kPoison);
    for (int m = 0; m < max_m; ++m) {
      for (int k = 0; k < spec.k; ++k) {
        // A mean that is not zero, so that the bias terms are large.
        x[static_cast<size_t>(m * x_stride_ + k)] = bench::ToBf16(random.Normal() + 0.25f);
      }
    }
    x_ = DeviceArray<uint16_t>(x);
    y_ = DeviceArray<uint16_t>(static_cast<size_t>((max_m + kGuard) * y_stride_));
    reference_ = Fp64Product(problem_.DenseMatrix(), x_.get(), max_m, spec.k, spec.n, x_stride_);
  }

  const cuda::PackedLayout& layout() const { return packed_.layout; }
  const bench::ProblemSpec& spec() const { return problem_.spec; }
  DeviceArray<uint16_t>& x() { return x_; }
  DeviceArray<uint16_t>& y() { return y_; }
  int x_stride() const { return x_stride_; }
  int y_stride() const { return y_stride_; }
  int max_m() const { return max_m_; }

  // Everything but the plan and options.
  cuda::LinearW4A16Params Params(const DeviceScratch& scratch, int m) {
    cuda::LinearW4A16Params p;
    p.layout = packed_.layout;
    p.weight = weight_.get();
    p.workspace = scratch.workspace.get();
    p.counters = scratch.counters.get();
    p.x = x_.get();
    p.y = y_.get();
    p.x_stride = x_stride_;
    p.y_stride = y_stride_;
    p.m = m;
    return p;
  }

  // Runs with poisoned outputs and workspace and checks values, guards and counters.
  template <typename Launch>
  void Verify(const cuda::LinearW4A16Params& params, DeviceScratch& scratch,
              const std::string& what, Launch&& launch) {
    const std::vector<uint16_t> poison(y_.count(), kPoison);
    FQ_CUDA_OK(cudaMemcpy(y_.get(), poison.data(), y_.bytes(), cudaMemcpyHostToDevice));
    scratch.workspace.FillBytes(0xff);
    const cudaError_t error = launch(params);
    const std::string name = spec().Name() + " m" + std::to_string(params.m) + " " + what;
    Check(error == cudaSuccess, name + ": " + cudaGetErrorString(error));
    if (error != cudaSuccess) return;
    FQ_CUDA_OK(cudaDeviceSynchronize());
    CompareWithReference(y_.ToHost(), y_stride_, reference_, params.m, spec().n, name);
    bool counters_zero = true;
    for (uint32_t counter : scratch.counters.ToHost())
      counters_zero = counters_zero && counter == 0;
    Check(counters_zero, name + ": counters not left zero");
  }

 private:
  int max_m_;
  bench::Problem problem_;
  cuda::PackedLinear packed_;
  DeviceArray<uint8_t> weight_;
  DeviceArray<uint16_t> x_;
  DeviceArray<uint16_t> y_;
  int x_stride_;
  int y_stride_;
  std::vector<double> reference_;
};

__global__ void CountDifferencesKernel(const uint16_t* a, const uint16_t* b, int64_t count,
                                       unsigned* differences) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count && a[i] != b[i]) atomicAdd(differences, 1u);
}

// Runs back to back give the same bits every time.
template <typename Launch>
void CheckRepeats(LinearCase& c, const cuda::LinearW4A16Params& params, int repeats,
                  Launch&& launch) {
  FQ_CUDA_OK(launch(params));
  FQ_CUDA_OK(cudaDeviceSynchronize());
  const DeviceArray<uint16_t> first = c.y().Clone();
  DeviceArray<unsigned> differences(1);
  differences.FillBytes(0);
  const int64_t count = int64_t{params.m} * c.y_stride();
  for (int i = 0; i < repeats; ++i) {
    FQ_CUDA_OK(launch(params));
    FQ_CUDA_OK(launch(params));
    CountDifferencesKernel<<<static_cast<unsigned>((count + 255) / 256), 256>>>(
        first.get(), c.y().get(), count, differences.get());
  }
  Check(differences.ToHost()[0] == 0, "repeats differ at m " + std::to_string(params.m));
}

// Row 3's bits do not depend on the other rows, NaNs and infinities included.
template <typename Launch>
void CheckRowIndependence(LinearCase& c, const cuda::LinearW4A16Params& params, Launch&& launch) {
  FQ_CUDA_OK(launch(params));
  const std::vector<uint16_t> before = c.y().ToHost();
  const DeviceArray<uint16_t> saved = c.x().Clone();
  std::vector<uint16_t> x = c.x().ToHost();
  for (int row = 0; row < params.m; ++row) {
    if (row == 3) continue;
    for (int k = 0; k < c.spec().k; ++k) {
      x[static_cast<size_t>(row * c.x_stride() + k)] =
          static_cast<uint16_t>(row % 2 == 0 ? 0x7fc0 : 0x7f80);
    }
  }
  FQ_CUDA_OK(cudaMemcpy(c.x().get(), x.data(), c.x().bytes(), cudaMemcpyHostToDevice));
  FQ_CUDA_OK(launch(params));
  const std::vector<uint16_t> after = c.y().ToHost();
  bool same = true;
  for (int n = 0; n < c.spec().n; ++n) {
    const auto i = static_cast<size_t>(3 * c.y_stride() + n);
    same = same && before[i] == after[i];
  }
  Check(same, "row 3 depends on the other rows at m " + std::to_string(params.m));
  FQ_CUDA_OK(cudaMemcpy(c.x().get(), saved.get(), c.x().bytes(), cudaMemcpyDeviceToDevice));
}

}  // namespace flashquant::gpu_test
