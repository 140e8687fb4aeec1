// CpuBackend: the Backend that runs anywhere. FP32 activations; a KV cache of FP32, BF16 or FP8;
// ops run at once on a thread pool, so Synchronize has nothing to wait for.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/thread_pool.h"

namespace flashquant {

class CpuBackend final : public Backend {
 public:
  // num_threads >= 1; row_multiple >= 1; kv_dtype: F32, BF16 or F8_E4M3.
  CpuBackend(int32_t num_threads, int32_t row_multiple, DType kv_dtype)
      : row_multiple_(row_multiple), kv_dtype_(kv_dtype), pool_(num_threads) {}

  BackendInfo info() const override;
  absl::StatusOr<DeviceBuffer> Allocate(int64_t num_bytes) override;
  absl::Status CopyToDevice(void* device, const void* host, int64_t num_bytes) override;
  absl::Status CopyToHost(void* host, const void* device, int64_t num_bytes) override;
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

 protected:
  void Free(void* data, int64_t num_bytes) override;

 private:
  const int32_t row_multiple_;
  const DType kv_dtype_;
  ThreadPool pool_;
  LinearScratch linear_scratch_;
  HostMemory attention_scratch_;
};

}  // namespace flashquant
