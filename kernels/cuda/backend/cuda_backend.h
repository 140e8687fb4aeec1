// CudaBackend: the Backend of one NVIDIA GPU. BF16 activations, a BF16 or FP8 KV cache, FP32 sums;
// all ops in order on one stream, none of them waits for the device.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/backend/attention_step.h"
#include "kernels/cuda/backend/cuda_device.h"
#include "kernels/cuda/backend/cuda_memory.h"
#include "kernels/cuda/backend/dense_linear.h"
#include "kernels/cuda/backend/fused_linear.h"
#include "kernels/cuda/backend/recorded_ops.h"

namespace flashquant::cuda {

class CudaBackend final : public Backend {
 public:
  // row_multiple >= 1; kv_dtype: BF16 or F8_E4M3; plans: of DeviceShape::tuned_plans. UNAVAILABLE
  // when there is no device that this build can use.
  static absl::StatusOr<std::unique_ptr<CudaBackend>> Create(int32_t row_multiple, DType kv_dtype,
                                                             std::vector<TunedPlan> plans = {});
  ~CudaBackend() override;

  // All ops are queued on it.
  cudaStream_t stream() const { return stream_; }

  BackendInfo info() const override;
  absl::StatusOr<DeviceBuffer> Allocate(int64_t num_bytes) override;
  absl::Status CopyToDevice(void* device, const void* host, int64_t num_bytes) override;
  absl::Status CopyToHost(void* host, const void* device, int64_t num_bytes) override;
  absl::Status QueueReadBack(int32_t slot, const void* device, int64_t num_bytes) override;
  absl::Status FinishReadBack(int32_t slot, void* host) override;
  absl::Status RecordMark(int32_t slot, int32_t mark) override;
  double SecondsBetweenMarks(int32_t slot, int32_t first, int32_t last) const override;
  absl::Status Synchronize() override;
  absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(
      std::span<const LinearPart> parts) override;

  absl::Status Embedding(const EmbeddingParams& params) override;
  absl::Status RmsNorm(const RmsNormParams& params) override;
  absl::Status LayerNorm(const LayerNormParams& params) override;
  absl::Status HeadNorm(const HeadNormParams& params) override;
  absl::Status AddPositions(const AddPositionsParams& params) override;
  absl::Status Relu(const ReluParams& params) override;
  absl::Status Linear(const LinearParams& params) override;
  absl::Status RopeAndKvWrite(const RopeAndKvWriteParams& params) override;
  absl::Status PagedAttention(const PagedAttentionParams& params) override;
  absl::Status SiluAndMul(const SiluAndMulParams& params) override;
  absl::Status GatherRows(const GatherRowsParams& params) override;
  absl::Status SampleTokens(const SampleTokensParams& params) override;
  absl::Status PlanAttention(const AttentionBatch& host_batch) override;
  absl::Status RopeAndAttention(const RopeAndKvWriteParams& rope,
                                const PagedAttentionParams& attention) override;
  absl::Status RunRecorded(const void* owner, int64_t key,
                           const std::function<absl::Status()>& queue) override;

 protected:
  void Free(void* data, int64_t num_bytes) override;

 private:
  CudaBackend(DeviceProperties device, int32_t row_multiple, DType kv_dtype)
      : device_(std::move(device)), row_multiple_(row_multiple), kv_dtype_(kv_dtype) {}

  bool fp8_cache() const { return kv_dtype_ == DType::kF8E4M3; }
  // `layer` without its matrix: through a BF16 copy of the weight, as many strips at once as
  // linear_route.h says.
  absl::Status UnpackedLinear(const FusedWeight& weight, const DenseLinearArguments& layer);

  const DeviceProperties device_;
  const int32_t row_multiple_;
  const DType kv_dtype_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<UploadRing> uploads_;
  std::array<ReadBackSlot, kNumReadBackSlots> read_backs_;
  std::array<std::array<Event, kNumMarks>, kNumReadBackSlots> marks_;
  std::unique_ptr<DenseLinear> dense_linear_;
  std::unique_ptr<FusedLinear> fused_linear_;
  std::unique_ptr<AttentionStep> attention_;
  std::unique_ptr<RecordedOps> recorded_;
};

}  // namespace flashquant::cuda
