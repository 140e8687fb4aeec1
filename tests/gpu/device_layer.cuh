// Device side of the GPU tests: error check, owning device arrays, launch parameters of a
// packed layer.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "kernels/bench/device_array.cuh"
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

struct ExitOnError {
  static bool Check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return true;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(3);
  }
};

template <typename T>
using DeviceArray = bench::BasicDeviceArray<T, ExitOnError>;

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
  DeviceScratch(int64_t workspace_bytes, int64_t num_counters)
      : workspace(static_cast<size_t>(workspace_bytes) / sizeof(float) + 4),
        counters(static_cast<size_t>(num_counters)) {
    counters.FillBytes(0);
  }
  DeviceScratch(const cuda::PackedLayout& layout, const cuda::LinearPlan& plan, int max_m)
      : DeviceScratch(cuda::LinearW4A16WorkspaceBytes(layout, plan, max_m), layout.num_strips) {}

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
