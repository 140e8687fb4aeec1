// Device side of the GPU tests: error check, owning device arrays, launch parameters of a
// packed layer.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "kernels/cuda/launchers.h"
#include "kernels/cuda/linear_w4a16/pack.h"
#include "kernels/cuda/linear_w4a16/plan.h"

namespace flashquant::gpu_test {

#define FQ_CUDA_OK(call)                                                 \
  do {                                                                   \
    const cudaError_t fq_error = (call);                                 \
    if (fq_error != cudaSuccess) {                                       \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                   cudaGetErrorString(fq_error));                        \
      std::exit(3);                                                      \
    }                                                                    \
  } while (false)

template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t count) : count_(count) {
    FQ_CUDA_OK(cudaMalloc(&data_, (count == 0 ? 1 : count) * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    FQ_CUDA_OK(cudaMemcpy(data_, host.data(), bytes(), cudaMemcpyHostToDevice));
  }
  DeviceArray(DeviceArray&& other) noexcept { *this = std::move(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  DeviceArray Clone() const {
    DeviceArray copy(count_);
    FQ_CUDA_OK(cudaMemcpy(copy.data_, data_, bytes(), cudaMemcpyDeviceToDevice));
    return copy;
  }
  std::vector<T> ToHost() const {
    std::vector<T> host(count_);
    FQ_CUDA_OK(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return host;
  }
  void FillBytes(int byte) { FQ_CUDA_OK(cudaMemset(data_, byte, bytes())); }
  T* get() const { return data_; }
  size_t count() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

inline const cuda::DeviceShape& ThisDevice() {
  static const cuda::DeviceShape shape = [] {
    cuda::DeviceShape device;
    FQ_CUDA_OK(cuda::QueryDeviceShape(&device));
    return device;
  }();
  return shape;
}

// What launches of a layer need besides its weight, for up to `max_m` rows.
struct DeviceScratch {
  DeviceScratch(const cuda::PackedLayout& layout, const cuda::LinearPlan& plan, int max_m)
      : workspace(static_cast<size_t>(cuda::LinearW4A16WorkspaceBytes(layout, plan, max_m)) / 4 +
                  4),
        counters(static_cast<size_t>(layout.num_strips)) {
    counters.FillBytes(0);
  }

  DeviceArray<float> workspace;
  DeviceArray<uint32_t> counters;
};

// The part of the launch parameters that the layer and the plan decide.
inline cuda::LinearW4A16Params LayerParams(const cuda::PackedLayout& layout, const uint8_t* weight,
                                           const cuda::LinearPlan& plan,
                                           const DeviceScratch& scratch) {
  cuda::LinearW4A16Params p;
  p.layout = layout;
  p.weight = weight;
  p.plan = plan;
  p.workspace = scratch.workspace.get();
  p.counters = scratch.counters.get();
  return p;
}

}  // namespace flashquant::gpu_test
