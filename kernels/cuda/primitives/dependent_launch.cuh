// Launching kernels so that one may start while the one before it in the stream still runs
// (programmatic dependent launch, sm_90 and later): blocks are placed and set up early and then
// wait in BeginDependent. Elsewhere these are plain launches.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace flashquant::cuda {

// What follows WaitForPreviousKernel may read what the kernel before wrote; ReleaseNextKernel lets
// the next kernel's blocks start (their own wait is still for the end of this one). Both do nothing
// when the launch did not ask for it.
__device__ __forceinline__ void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void ReleaseNextKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Both. Every kernel that LaunchDependent launches calls it before it reads what kernels before it
// wrote, or writes at all. A kernel's blocks are all placed before one of the next is, and what a
// kernel waits for has itself waited, so the order of their work is that of the stream.
__device__ __forceinline__ void BeginDependent() {
  ReleaseNextKernel();
  WaitForPreviousKernel();
}

// Whether the device runs code that has the waits of BeginDependent: a newer device may run code
// that was compiled for one without. `kernel`: any; all are compiled for the same devices.
inline bool HasDependentLaunch(const void* kernel) {
  static const bool has = [kernel] {
    cudaFuncAttributes code = {};
    return cudaFuncGetAttributes(&code, kernel) == cudaSuccess && code.ptxVersion >= 90;
  }();
  return has;
}

template <typename... Params, typename... Args>
cudaError_t LaunchDependent(void (*kernel)(Params...), dim3 grid, unsigned threads,
                            size_t shared_bytes, cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = HasDependentLaunch(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...);
}

}  // namespace flashquant::cuda
