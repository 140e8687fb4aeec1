#include "kernels/cuda/backend/cuda_device.h"

#include <cuda_runtime_api.h>

#include <array>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/cuda_status.h"
#include "kernels/cuda/backend/device_support.h"
#include "kernels/cuda/backend/op_launchers.h"

namespace flashquant::cuda {
namespace {

absl::StatusOr<int> CountDevices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    FQ_RETURN_IF_ERROR(CheckDriver(driver, CUDART_VERSION));
    return UnavailableError("backend 'cuda': {}", cudaGetErrorString(error));
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
  if (count < 1) return CheckDriver(0, CUDART_VERSION);
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
  FQ_RETURN_IF_ERROR(CheckCapability(device.name, device.compute_major, device.compute_minor));
  error = HasDeviceCode();
  if (error != cudaSuccess) {
    return UnavailableError(
        "backend 'cuda': this build has no code for {} (compute capability {}.{}): {}", device.name,
        device.compute_major, device.compute_minor, cudaGetErrorString(error));
  }
  std::array<char, 32> bus_id{};
  if (cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), device.index) ==
      cudaSuccess) {
    device.pci_bus_id = bus_id.data();
  }
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  FQ_RETURN_IF_ERROR(ToStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "memory"));
  device.free_memory_bytes = static_cast<int64_t>(free_bytes);
  return device;
}

}  // namespace flashquant::cuda
