#include "kernels/cuda/backend/cuda_backend.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/cuda_linear_weight.h"
#include "kernels/cuda/backend/cuda_status.h"
#include "kernels/cuda/backend/linear_route.h"
#include "kernels/cuda/backend/op_launchers.h"

namespace flashquant::cuda {
namespace {

// Left to the driver and to buffers that grow with the batch.
constexpr int64_t kReservedBytes = int64_t{512} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<CudaBackend>> CudaBackend::Create(int32_t row_multiple,
                                                                 DType kv_dtype,
                                                                 std::vector<TunedPlan> plans) {
  FQ_ASSIGN_OR_RETURN(DeviceProperties device, OpenDevice());
  std::unique_ptr<CudaBackend> backend(new CudaBackend(std::move(device), row_multiple, kv_dtype));
  FQ_RETURN_IF_ERROR(
      ToStatus(cudaStreamCreateWithFlags(&backend->stream_, cudaStreamNonBlocking), "stream"));
  FQ_ASSIGN_OR_RETURN(UploadRing uploads, UploadRing::Create(backend->stream_));
  backend->uploads_ = std::make_unique<UploadRing>(std::move(uploads));
  FQ_ASSIGN_OR_RETURN(backend->dense_linear_, DenseLinear::Create(backend.get(), backend->stream_));
  FQ_ASSIGN_OR_RETURN(backend->fused_linear_,
                      FusedLinear::Create(backend.get(), backend->stream_, std::move(plans)));
  for (auto& marks : backend->marks_) {
    for (Event& mark : marks) {
      FQ_ASSIGN_OR_RETURN(mark, Event::Create(/*timed=*/true));
    }
  }
  backend->attention_ = std::make_unique<AttentionStep>(backend.get(), backend->stream_,
                                                        backend->device_, backend->fp8_cache());
  backend->recorded_ = std::make_unique<RecordedOps>(backend->stream_);
  return backend;
}

CudaBackend::~CudaBackend() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  recorded_.reset();
  // They hold buffers of this backend.
  attention_.reset();
  fused_linear_.reset();
  dense_linear_.reset();
  uploads_.reset();
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

BackendInfo CudaBackend::info() const {
  BackendInfo info;
  info.name = "cuda";
  info.device = fmt::format("{}, compute capability {}.{}", device_.name, device_.compute_major,
                            device_.compute_minor);
  info.activation_dtype = DType::kBF16;
  info.kv_dtype = kv_dtype_;
  info.row_multiple = row_multiple_;
  info.records_ops = true;
  info.exact_rows = false;
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
    info.free_memory_bytes =
        std::max<int64_t>(0, static_cast<int64_t>(free_bytes) - kReservedBytes);
    info.total_memory_bytes = static_cast<int64_t>(total_bytes);
    info.taken_memory_bytes = device_.free_memory_bytes - static_cast<int64_t>(free_bytes);
  }
  info.pci_bus_id = device_.pci_bus_id;
  return info;
}

absl::StatusOr<DeviceBuffer> CudaBackend::Allocate(int64_t num_bytes) {
  if (num_bytes < 0) return InvalidArgumentError("allocation of {} bytes", num_bytes);
  if (num_bytes == 0) return DeviceBuffer();
  if (num_bytes > device_.total_memory_bytes) {
    return ResourceExhaustedError("GPU memory: {} bytes wanted, the device has {}", num_bytes,
                                  device_.total_memory_bytes);
  }
  void* data = nullptr;
  FQ_RETURN_IF_ERROR(ToStatus(cudaMalloc(&data, static_cast<size_t>(num_bytes)),
                              fmt::format("{} bytes wanted", num_bytes)));
  DeviceBuffer buffer(this, data, num_bytes);
  FQ_RETURN_IF_ERROR(
      ToStatus(cudaMemsetAsync(data, 0, static_cast<size_t>(num_bytes), stream_), "clearing"));
  return buffer;
}

// Nothing in flight may read freed memory, nor what is replayed later.
void CudaBackend::Free(void* data, int64_t /*num_bytes*/) {
  if (recorded_ != nullptr) recorded_->Clear();
  cudaStreamSynchronize(stream_);
  cudaFree(data);
}

absl::Status CudaBackend::CopyToDevice(void* device, const void* host, int64_t num_bytes) {
  return uploads_->Copy(device, host, num_bytes);
}

absl::Status CudaBackend::CopyToHost(void* host, const void* device, int64_t num_bytes) {
  if (num_bytes == 0) return absl::OkStatus();
  return ToStatus(cudaMemcpyAsync(host, device, static_cast<size_t>(num_bytes),
                                  cudaMemcpyDeviceToHost, stream_),
                  "copy to host");
}

absl::Status CudaBackend::QueueReadBack(int32_t slot, const void* device, int64_t num_bytes) {
  FQ_CHECK(slot >= 0 && slot < kNumReadBackSlots);
  return read_backs_[static_cast<size_t>(slot)].Queue(device, num_bytes, stream_);
}

absl::Status CudaBackend::FinishReadBack(int32_t slot, void* host) {
  FQ_CHECK(slot >= 0 && slot < kNumReadBackSlots);
  return read_backs_[static_cast<size_t>(slot)].Finish(host);
}

absl::Status CudaBackend::RecordMark(int32_t slot, int32_t mark) {
  FQ_CHECK(slot >= 0 && slot < kNumReadBackSlots && mark >= 0 && mark < kNumMarks);
  return marks_[static_cast<size_t>(slot)][static_cast<size_t>(mark)].Record(stream_);
}

double CudaBackend::SecondsBetweenMarks(int32_t slot, int32_t first, int32_t last) const {
  const auto& marks = marks_[static_cast<size_t>(slot)];
  return marks[static_cast<size_t>(last)].SecondsSince(marks[static_cast<size_t>(first)]);
}

absl::Status CudaBackend::Synchronize() {
  return ToStatus(cudaStreamSynchronize(stream_), "synchronize");
}

absl::StatusOr<std::unique_ptr<LinearWeight>> CudaBackend::PackLinear(
    std::span<const LinearPart> parts) {
  FQ_ASSIGN_OR_RETURN(std::optional<FusedWeight> fused, fused_linear_->Pack(parts));
  if (fused.has_value()) return std::make_unique<CudaLinearWeight>(*std::move(fused));
  FQ_ASSIGN_OR_RETURN(std::unique_ptr<LinearWeight> weight, MakeDenseWeight(parts, this));
  return weight;
}

absl::Status CudaBackend::Embedding(const EmbeddingParams& params) {
  const auto& table = static_cast<const CudaLinearWeight&>(*params.table);
  if (!table.is_table()) {
    return InvalidArgumentError("embedding table in INT4; BF16, F16, F32 or I8");
  }
  return ToStatus(LaunchEmbedding(params, table.matrix(), table.n(), table.k(), stream_),
                  "embedding");
}

absl::Status CudaBackend::RmsNorm(const RmsNormParams& params) {
  return ToStatus(LaunchRmsNorm(params, stream_), "rms_norm");
}

absl::Status CudaBackend::LayerNorm(const LayerNormParams& params) {
  return ToStatus(LaunchLayerNorm(params, stream_), "layer_norm");
}

absl::Status CudaBackend::HeadNorm(const HeadNormParams& params) {
  return ToStatus(LaunchHeadNorm(params, stream_), "head_norm");
}

absl::Status CudaBackend::AddPositions(const AddPositionsParams& params) {
  return ToStatus(LaunchAddPositions(params, stream_), "add_positions");
}

absl::Status CudaBackend::Relu(const ReluParams& params) {
  return ToStatus(LaunchRelu(params, stream_), "relu");
}

absl::Status CudaBackend::Linear(const LinearParams& params) {
  if (params.y_dtype != DType::kF32 && params.y_dtype != DType::kBF16) {
    return InvalidArgumentError("linear: output dtype {}; the CUDA backend writes BF16 or F32",
                                DTypeName(params.y_dtype));
  }
  if (params.num_rows < 1) return InvalidArgumentError("linear: {} rows", params.num_rows);
  const auto& weight = static_cast<const CudaLinearWeight&>(*params.weight);
  const FusedWeight* fused = weight.fused();
  const bool y_is_float = params.y_dtype == DType::kF32;
  if (fused != nullptr && y_is_float) {
    return fused_linear_->RunToFloat(*fused, params.num_rows, params.x,
                                     static_cast<float*>(params.y));
  }
  if (fused != nullptr && params.num_rows <= fused_linear_->max_rows()) {
    return fused_linear_->Run(*fused, params.num_rows, params.x, params.y);
  }
  const DenseLinearArguments dense = {.num_rows = params.num_rows,
                                      .n = weight.n(),
                                      .k = weight.k(),
                                      .y_stride = weight.n(),
                                      .x = params.x,
                                      .matrix = weight.matrix(),
                                      .bias = weight.bias(),
                                      .y = params.y,
                                      .y_is_float = y_is_float};
  return fused != nullptr ? UnpackedLinear(*fused, dense) : dense_linear_->Run(dense);
}

absl::Status CudaBackend::UnpackedLinear(const FusedWeight& weight,
                                         const DenseLinearArguments& layer) {
  const int32_t at_once = UnpackStripsAtOnce(weight.layout);
  for (int32_t strip = 0; strip < weight.layout.num_strips; strip += at_once) {
    const StripRange strips = {strip, std::min(at_once, weight.layout.num_strips - strip)};
    const int64_t column = int64_t{strip} * kStripN;
    DenseLinearArguments part = layer;
    part.n = std::min(int64_t{strips.count} * kStripN, layer.n - column);
    FQ_ASSIGN_OR_RETURN(part.matrix, fused_linear_->Unpack(weight, strips));
    if (part.bias != nullptr) part.bias = static_cast<const BFloat16*>(part.bias) + column;
    part.y = static_cast<BFloat16*>(part.y) + column;
    FQ_RETURN_IF_ERROR(dense_linear_->Run(part));
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::RopeAndKvWrite(const RopeAndKvWriteParams& params) {
  return ToStatus(LaunchRopeAndKvWrite(params, fp8_cache(), stream_), "rope_and_kv_write");
}

absl::Status CudaBackend::PlanAttention(const AttentionBatch& host_batch) {
  attention_->Begin(host_batch);
  return absl::OkStatus();
}

absl::Status CudaBackend::PagedAttention(const PagedAttentionParams& params) {
  return attention_->Run(params, nullptr);
}

absl::Status CudaBackend::RopeAndAttention(const RopeAndKvWriteParams& rope,
                                           const PagedAttentionParams& attention) {
  if (attention_->IsDecode()) return attention_->Run(attention, rope.cos_sin);
  FQ_RETURN_IF_ERROR(RopeAndKvWrite(rope));
  return attention_->Run(attention, nullptr);
}

absl::Status CudaBackend::RunRecorded(const void* owner, int64_t key,
                                      const std::function<absl::Status()>& queue) {
  return recorded_->Run(owner, key, queue);
}

absl::Status CudaBackend::SiluAndMul(const SiluAndMulParams& params) {
  return ToStatus(LaunchSiluAndMul(params, stream_), "silu_and_mul");
}

absl::Status CudaBackend::GatherRows(const GatherRowsParams& params) {
  return ToStatus(LaunchGatherRows(params, stream_), "gather_rows");
}

absl::Status CudaBackend::SampleTokens(const SampleTokensParams& params) {
  return ToStatus(LaunchSampleTokens(params, stream_), "sample_tokens");
}

}  // namespace flashquant::cuda
