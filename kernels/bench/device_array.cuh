// Owning device arrays of benchmarks and GPU tests, for whom a failing CUDA call means different
// things: `Errors::Check(error, what)` says what to do with one and returns whether all is well.
#pragma once

#include <cuda_runtime.h>

#include <utility>
#include <vector>

namespace flashquant::bench {

// After an error that `Errors` survives the array is empty, and its functions do nothing.
template <typename T, typename Errors>
class BasicDeviceArray {
 public:
  BasicDeviceArray() = default;
  explicit BasicDeviceArray(size_t count) : count_(count) {
    if (!Errors::Check(cudaMalloc(&data_, (count == 0 ? 1 : count) * sizeof(T)), "cudaMalloc")) {
      data_ = nullptr;
    }
  }
  explicit BasicDeviceArray(const std::vector<T>& host) : BasicDeviceArray(host.size()) {
    Copy(data_, host.data(), cudaMemcpyHostToDevice);
  }
  BasicDeviceArray(BasicDeviceArray&& other) noexcept { *this = std::move(other); }
  BasicDeviceArray& operator=(BasicDeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~BasicDeviceArray() { cudaFree(data_); }

  BasicDeviceArray Clone() const {
    BasicDeviceArray copy(count_);
    if (copy.data_ != nullptr) Copy(copy.data_, data_, cudaMemcpyDeviceToDevice);
    return copy;
  }
  std::vector<T> ToHost() const {
    std::vector<T> host(count_);
    Copy(host.data(), data_, cudaMemcpyDeviceToHost);
    return host;
  }
  void FillBytes(int byte) {
    if (data_ != nullptr) Errors::Check(cudaMemset(data_, byte, bytes()), "cudaMemset");
  }
  T* get() const { return data_; }
  size_t count() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }

 private:
  void Copy(T* to, const T* from, cudaMemcpyKind kind) const {
    if (data_ != nullptr) Errors::Check(cudaMemcpy(to, from, bytes(), kind), "cudaMemcpy");
  }

  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace flashquant::bench
