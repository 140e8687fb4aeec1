// CudaLinearWeight: the CUDA backend's form of a linear layer, all parts joined along N: INT4
// layers as the fused kernel reads them, everything else, and INT4 layers that it does not take, as
// one BF16 matrix into which they are dequantised at load.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/backend/fused_linear.h"

namespace flashquant::cuda {

class CudaLinearWeight final : public LinearWeight {
 public:
  // A BF16 matrix [N, K], row-major, and a bias [N] or an empty buffer.
  CudaLinearWeight(int64_t n, int64_t k, DeviceBuffer matrix, DeviceBuffer bias, bool is_table)
      : LinearWeight(n, k, matrix.num_bytes() + bias.num_bytes()),
        matrix_(std::move(matrix)),
        bias_(std::move(bias)),
        is_table_(is_table) {}
  explicit CudaLinearWeight(FusedWeight fused)
      : LinearWeight(fused.layout.n, fused.layout.k,
                     fused.bytes.num_bytes() + fused.bias.num_bytes()),
        fused_(std::move(fused)) {}

  // Null for a layer that is not in the fused kernel's form, which has no matrix.
  const FusedWeight* fused() const { return fused_.has_value() ? &*fused_ : nullptr; }
  const void* matrix() const { return matrix_.data(); }
  // Zero for parts without; null when no part has one.
  const void* bias() const { return fused_.has_value() ? fused_->bias.data() : bias_.data(); }
  // No part is INT4: may serve as an embedding table.
  bool is_table() const { return is_table_; }

 private:
  std::optional<FusedWeight> fused_;
  DeviceBuffer matrix_;
  DeviceBuffer bias_;
  bool is_table_ = false;
};

// The layer as a BF16 matrix. INVALID_ARGUMENT for parts that do not fit together, DATA_LOSS for a
// broken INT4 weight. UNIMPLEMENTED for outliers in FP16.
absl::StatusOr<std::unique_ptr<CudaLinearWeight>> MakeDenseWeight(std::span<const LinearPart> parts,
                                                                  Backend* backend);

// All parts' biases [n] in BF16, zeros for those without; empty when no part has one.
absl::StatusOr<DeviceBuffer> CopyBias(std::span<const LinearPart> parts, int64_t n,
                                      Backend* backend);

}  // namespace flashquant::cuda
