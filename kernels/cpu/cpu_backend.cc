#include "kernels/cpu/cpu_backend.h"

#include <cstring>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/packed_linear.h"

namespace flashquant {

BackendInfo CpuBackend::info() const {
  BackendInfo info;
  info.name = "cpu";
  std::string_view target = CpuTargetName();
  if (target == "AVX3") target = "AVX-512";
  if (target == "AVX3_DL") target = "AVX-512 VNNI";
  info.device = fmt::format("{} threads, {}", pool_.num_threads(), target);
  info.activation_dtype = DType::kF32;
  info.kv_dtype = kv_dtype_;
  info.row_multiple = row_multiple_;
  info.free_memory_bytes = FreeHostMemoryBytes();
  return info;
}

absl::StatusOr<DeviceBuffer> CpuBackend::Allocate(int64_t num_bytes) {
  FQ_ASSIGN_OR_RETURN(void* data, AllocateHostMemory(num_bytes));
  return DeviceBuffer(this, data, num_bytes);
}

void CpuBackend::Free(void* data, int64_t num_bytes) { FreeHostMemory(data, num_bytes); }

absl::Status CpuBackend::CopyToDevice(void* device, const void* host, int64_t num_bytes) {
  if (num_bytes > 0) std::memcpy(device, host, static_cast<size_t>(num_bytes));
  return absl::OkStatus();
}

absl::Status CpuBackend::CopyToHost(void* host, const void* device, int64_t num_bytes) {
  if (num_bytes > 0) std::memcpy(host, device, static_cast<size_t>(num_bytes));
  return absl::OkStatus();
}

absl::Status CpuBackend::Synchronize() { return absl::OkStatus(); }

absl::StatusOr<std::unique_ptr<LinearWeight>> CpuBackend::PackLinear(
    std::span<const LinearPart> parts) {
  FQ_ASSIGN_OR_RETURN(std::unique_ptr<LinearWeight> weight, MakePackedLinear(parts));
  return weight;
}

absl::Status CpuBackend::Embedding(const EmbeddingParams& params) {
  return EmbeddingCpu(params, pool_);
}

absl::Status CpuBackend::RmsNorm(const RmsNormParams& params) {
  RmsNormCpu(params, pool_);
  return absl::OkStatus();
}

absl::Status CpuBackend::LayerNorm(const LayerNormParams& params) {
  LayerNormCpu(params, pool_);
  return absl::OkStatus();
}

absl::Status CpuBackend::HeadNorm(const HeadNormParams& params) {
  HeadNormCpu(params, pool_);
  return absl::OkStatus();
}

absl::Status CpuBackend::AddPositions(const AddPositionsParams& params) {
  AddPositionsCpu(params, pool_);
  return absl::OkStatus();
}

absl::Status CpuBackend::Relu(const ReluParams& params) {
  ReluCpu(params, pool_);
  return absl::OkStatus();
}

absl::Status CpuBackend::Linear(const LinearParams& params) {
  if (params.y_dtype != DType::kF32) {
    return InvalidArgumentError("linear: output dtype {}; the CPU backend writes F32",
                                DTypeName(params.y_dtype));
  }
  if (params.num_rows < 1) return InvalidArgumentError("linear: {} rows", params.num_rows);
  return LinearCpu(params, pool_, linear_scratch_);
}

absl::Status CpuBackend::RopeAndKvWrite(const RopeAndKvWriteParams& params) {
  RopeAndKvWriteCpu(params, kv_dtype_, pool_);
  return absl::OkStatus();
}

absl::Status CpuBackend::PagedAttention(const PagedAttentionParams& params) {
  if (params.num_kv_heads < 1 || params.num_heads % params.num_kv_heads != 0) {
    return InvalidArgumentError("attention: {} query heads do not share {} KV heads evenly",
                                params.num_heads, params.num_kv_heads);
  }
  const int64_t num_bytes =
      pool_.num_threads() * AttentionScratchFloats(params, kv_dtype_) * int64_t{sizeof(float)};
  if (num_bytes > attention_scratch_.num_bytes()) {
    FQ_ASSIGN_OR_RETURN(attention_scratch_, HostMemory::Create(num_bytes));
  }
  PagedAttentionCpu(params, kv_dtype_, pool_, attention_scratch_.As<float>());
  return absl::OkStatus();
}

absl::Status CpuBackend::SiluAndMul(const SiluAndMulParams& params) {
  SiluAndMulCpu(params, pool_);
  return absl::OkStatus();
}

absl::Status CpuBackend::GatherRows(const GatherRowsParams& params) {
  GatherRowsCpu(params, pool_);
  return absl::OkStatus();
}

absl::Status CpuBackend::SampleTokens(const SampleTokensParams& params) {
  SampleTokensCpu(params, pool_);
  return absl::OkStatus();
}

}  // namespace flashquant
