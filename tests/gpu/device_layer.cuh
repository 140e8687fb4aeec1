// Device side of the GPU tests: error check, owning device arrays, a packed layer with its plan.
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

// A plan in device memory with the workspace it needs for up to `max_m` rows.
struct DevicePlan {
  DevicePlan(const cuda::LinearPlan& plan, int max_m)
      : units(plan.units),
        warps(plan.warps),
        rows(plan.rows),
        workspace(static_cast<size_t>(cuda::LinearW4A16WorkspaceBytes(plan.num_pieces, max_m)) / 4),
        num_blocks(plan.num_blocks),
        num_warps(plan.num_warps),
        stage_bytes(plan.stage_bytes),
        slice_chunks(plan.slice_chunks),
        num_first_slots(plan.num_first_slots) {}

  DeviceArray<cuda::Unit> units;
  DeviceArray<cuda::WarpPlan> warps;
  DeviceArray<cuda::RowInfo> rows;
  DeviceArray<float> workspace;
  int num_blocks;
  int num_warps;
  int stage_bytes;
  int slice_chunks;
  int num_first_slots;
};

// The part of the launch parameters that the layer and the plan decide.
inline cuda::LinearW4A16Params LayerParams(const cuda::PackedLinear& packed, const uint8_t* records,
                                           const DevicePlan& plan, uint32_t* counters) {
  cuda::LinearW4A16Params p;
  p.k = packed.k;
  p.n = packed.n;
  p.records = records;
  p.groups_per_chunk = packed.groups_per_chunk;
  p.has_zeros = packed.has_zeros;
  p.stage_bytes = plan.stage_bytes;
  p.num_warps = plan.num_warps;
  p.units = plan.units.get();
  p.warps = plan.warps.get();
  p.rows = plan.rows.get();
  p.num_blocks = plan.num_blocks;
  p.slice_chunks = plan.slice_chunks;
  p.num_first_slots = plan.num_first_slots;
  p.workspace = plan.workspace.get();
  p.counters = counters;
  return p;
}

}  // namespace flashquant::gpu_test
