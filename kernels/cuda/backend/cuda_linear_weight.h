// CudaLinearWeight: the CUDA backend's form of a linear layer, all parts joined along N as one BF16
// matrix in device memory. INT4 parts and their outliers are dequantised into it at load: the form
// of layers that the fused kernel does not take.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace flashquant::cuda {

class CudaLinearWeight final : public LinearWeight {
 public:
  CudaLinearWeight(int64_t n, int64_t k, int64_t num_bytes, DeviceBuffer matrix, DeviceBuffer bias,
                   bool is_dense)
      : LinearWeight(n, k, num_bytes),
        matrix_(std::move(matrix)),
        bias_(std::move(bias)),
        is_dense_(is_dense) {}

  // [N, K] BF16, row-major.
  const void* matrix() const { return matrix_.data(); }
  // [N] BF16, zero for parts without; null when no part has one.
  const void* bias() const { return bias_.data(); }
  // No part is INT4: may serve as an embedding table.
  bool is_dense() const { return is_dense_; }

 private:
  DeviceBuffer matrix_;
  DeviceBuffer bias_;
  bool is_dense_;
};

// INVALID_ARGUMENT for parts that do not fit together, DATA_LOSS for a broken INT4 weight.
// UNIMPLEMENTED for outliers in FP16.
absl::StatusOr<std::unique_ptr<CudaLinearWeight>> MakeCudaLinearWeight(
    std::span<const LinearPart> parts, Backend* backend);

}  // namespace flashquant::cuda
