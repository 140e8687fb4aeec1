// Device arrays of the benchmarks, and how they deal with errors: the first CUDA call of a thread
// that fails is kept in words, later work goes on as a quick no-op where that matters, and the
// benchmark reports it at its end.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels/bench/device_array.cuh"

namespace flashquant::bench {

// "" while all is well.
inline std::string& FirstCudaError() {
  thread_local std::string error;
  return error;
}

inline bool CudaFailed() { return !FirstCudaError().empty(); }

inline bool NoteCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return true;
  if (!CudaFailed()) FirstCudaError() = std::string(what) + ": " + cudaGetErrorString(error);
  return false;
}

#define FQ_NOTE_CUDA(call) ::flashquant::bench::NoteCuda((call), #call)

struct KeepFirstError {
  static bool Check(cudaError_t error, const char* what) { return NoteCuda(error, what); }
};

template <typename T>
using DeviceArray = BasicDeviceArray<T, KeepFirstError>;

// At least two arrays, together more than 256 MB, so that none is in a cache when its turn comes.
inline int NumColdCopies(int64_t bytes) {
  constexpr int64_t kColdBytes = 256 << 20;
  const int64_t copies = (kColdBytes + bytes - 1) / (bytes > 0 ? bytes : 1);
  return static_cast<int>(copies < 2 ? 2 : copies);
}

template <typename T>
std::vector<DeviceArray<T>> ColdCopies(DeviceArray<T> first, int count) {
  std::vector<DeviceArray<T>> copies;
  copies.push_back(std::move(first));
  while (static_cast<int>(copies.size()) < count && !CudaFailed()) {
    copies.push_back(copies[0].Clone());
  }
  return copies;
}

}  // namespace flashquant::bench
