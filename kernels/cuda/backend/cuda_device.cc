#include "kernels/cuda/backend/cuda_device.h"

#include <cuda_runtime_api.h>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/cuda_status.h"
#include "kernels/cuda/backend/op_launchers.h"

namespace flashquant::cuda {
namespace {

constexpr int kLeastComputeMajor = 8;  // BF16 tensor cores, cp.async

absl::Status NoDriver() {
  return UnavailableError(
      "backend 'cuda': no usable NVIDIA driver; install one, or use --backend cpu");
}

absl::StatusOr<int> CountDevices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return NoDriver();
    return UnavailableError(
        "backend 'cuda': the NVIDIA driver is too old (CUDA {}.{}, this build needs {}.{})",
        driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    return UnavailableError("backend 'cuda': no NVIDIA GPU visible to this process");
  }
  if (error != cudaSuccess) {
    return UnavailableError("backend 'cuda': {}", cudaGetErrorString(error));
  }
  return count;
}

}  // namespace

absl::StatusOr<DeviceProperties> OpenDevice() {
  FQ_ASSIGN_OR_RETURN(const int count, CountDevices());
  if (count < 1) return NoDriver();
  DeviceProperties device;
  cudaError_t error = cudaSetDevice(device.index);
  cudaDeviceProp properties;
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, device.index);
  if (error != cudaSuccess) {
    return UnavailableError("backend 'cuda': the GPU cannot be opened: {}",
                            cudaGetErrorString(error));
  }
  device.name = properties.name;
  device.compute_major = properties.major;
  device.compute_minor = properties.minor;
  device.num_multiprocessors = properties.multiProcessorCount;
  device.shared_bytes_per_block = static_cast<int>(properties.sharedMemPerBlockOptin);
  device.total_memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  if (device.compute_major < kLeastComputeMajor) {
    return UnavailableError(
        "backend 'cuda': {} has compute capability {}.{}; at least {}.0 is needed", device.name,
        device.compute_major, device.compute_minor, kLeastComputeMajor);
  }
  error = HasDeviceCode();
  if (error != cudaSuccess) {
    return UnavailableError(
        "backend 'cuda': this build has no code for {} (compute capability {}.{}): {}", device.name,
        device.compute_major, device.compute_minor, cudaGetErrorString(error));
  }
  return device;
}

}  // namespace flashquant::cuda
