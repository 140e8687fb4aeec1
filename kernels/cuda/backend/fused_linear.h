// FusedLinear: INT4 layers with outliers through the fused kernels (launchers.h): one reads a
// weight once for up to 32 rows (fewer where these do not fit in shared memory), the other, where
// the device has it, once for up to 128. More rows than max_rows go through a BF16 copy that is
// unpacked into scratch memory for the one product.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/backend/linear_route.h"
#include "kernels/cuda/backend/unpack_weight.h"
#include "kernels/cuda/launchers.h"

namespace flashquant::cuda {

// A layer in the kernel's form, all parts joined along N.
struct FusedWeight {
  PackedLayout layout;
  DeviceBuffer bytes;
  DeviceBuffer bias;               // [n] BF16, or empty
  std::array<PassPlan, 3> passes;  // see ChoosePassPlans
};

// Used from one thread, on one stream. Owns what the launches share: partial sums and counters,
// sized by Pack for the largest layer, and scratch memory that grows when it is first needed.
class FusedLinear final {
 public:
  static absl::StatusOr<std::unique_ptr<FusedLinear>> Create(Backend* backend, cudaStream_t stream,
                                                             std::vector<TunedPlan> plans);

  // nullopt when the kernel does not take this layer: a part that is not INT4, N or K not a
  // multiple of 8, N above 2 million, parts that cannot be joined, no plan for this device. Errors
  // of the parts themselves as CheckLinearParts gives them. Packed on the device; on the host when
  // parts do not end where tiles of outliers do.
  absl::StatusOr<std::optional<FusedWeight>> Pack(std::span<const LinearPart> parts);

  // With more rows, Unpack is the faster way.
  int32_t max_rows() const { return std::max(rows_.passes, rows_.many_rows); }

  // y[num_rows, n] = x[num_rows, k] * W + bias, both BF16; num_rows >= 1.
  absl::Status Run(const FusedWeight& weight, int32_t num_rows, const void* x, void* y);
  // The same for any number of rows with y in FP32: the product is rounded to BF16 on its way.
  absl::Status RunToFloat(const FusedWeight& weight, int32_t num_rows, const void* x, float* y);

  // Strips of the layer as a BF16 matrix [their channels, k], valid for ops queued before the next
  // Unpack. At most UnpackStripsAtOnce (linear_route.h).
  absl::StatusOr<const void*> Unpack(const FusedWeight& weight, const StripRange& strips);

 private:
  FusedLinear(Backend* backend, cudaStream_t stream, std::vector<TunedPlan> plans)
      : backend_(backend), stream_(stream), tuned_plans_(std::move(plans)) {}
  // Without bytes: the kernel does not take the layer.
  absl::StatusOr<FusedWeight> PackOnHost(std::span<const LinearPart> parts) const;
  absl::StatusOr<FusedWeight> PackOnGpu(std::span<const LinearPart> parts);
  // False: the kernel cannot run this layout here.
  bool ChoosePlans(FusedWeight* weight) const;
  absl::Status Reserve(const FusedWeight& weight);
  absl::Status Multiply(const FusedWeight& weight, int32_t num_rows, const void* x, void* y);

  Backend* const backend_;
  const cudaStream_t stream_;
  const std::vector<TunedPlan> tuned_plans_;
  DeviceShape device_;
  FusedRows rows_;
  DeviceBuffer unpack_tables_;
  DeviceBuffer workspace_;
  DeviceBuffer counters_;  // zero between launches
  DeviceBuffer matrix_;    // see Unpack
  DeviceBuffer rounded_;   // products of RunToFloat
  DeviceBuffer staging_;   // canonical arrays while layers are packed
};

}  // namespace flashquant::cuda
