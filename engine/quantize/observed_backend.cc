#include "engine/quantize/observed_backend.h"

#include "kernels/base/bfloat16.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

absl::Status ObservedBackend::ReadActivations(const void* device, int64_t count,
                                              std::vector<float>* out) {
  out->resize(static_cast<size_t>(count));
  if (info().activation_dtype == DType::kF32) {
    FQ_RETURN_IF_ERROR(
        CopyToHost(out->data(), device, count * static_cast<int64_t>(sizeof(float))));
    return Synchronize();
  }
  if (info().activation_dtype != DType::kBF16) {
    return UnimplementedError("calibration: activations of type {}",
                              DTypeName(info().activation_dtype));
  }
  std::vector<BFloat16> rounded(out->size());
  FQ_RETURN_IF_ERROR(
      CopyToHost(rounded.data(), device, count * static_cast<int64_t>(sizeof(BFloat16))));
  FQ_RETURN_IF_ERROR(Synchronize());
  for (size_t i = 0; i < rounded.size(); ++i) (*out)[i] = ToFloat(rounded[i]);
  return absl::OkStatus();
}

absl::Status ObservedBackend::Embedding(const EmbeddingParams& params) {
  done_ = false;
  before_attention_ = true;
  if (embeddings_ == nullptr) return inner().Embedding(params);
  return CopyToDevice(params.out, embeddings_,
                      params.num_tokens * params.table->k() * DTypeBytes(info().activation_dtype));
}

absl::Status ObservedBackend::Linear(const LinearParams& params) {
  if (skip()) return absl::OkStatus();
  if (params.weight != observed_ || observed_ == nullptr) return inner().Linear(params);
  done_ = true;
  FQ_RETURN_IF_ERROR(ReadActivations(params.x, params.num_rows * params.weight->k(), &inputs_));
  observer_(inputs_);
  return absl::OkStatus();
}

absl::Status ObservedBackend::RmsNorm(const RmsNormParams& params) {
  return skip() ? absl::OkStatus() : inner().RmsNorm(params);
}

absl::Status ObservedBackend::LayerNorm(const LayerNormParams& params) {
  return skip() ? absl::OkStatus() : inner().LayerNorm(params);
}

absl::Status ObservedBackend::HeadNorm(const HeadNormParams& params) {
  return skip() ? absl::OkStatus() : inner().HeadNorm(params);
}

// Stored rows have their positions in them already.
absl::Status ObservedBackend::AddPositions(const AddPositionsParams& params) {
  return embeddings_ != nullptr ? absl::OkStatus() : inner().AddPositions(params);
}

absl::Status ObservedBackend::Relu(const ReluParams& params) {
  return skip() ? absl::OkStatus() : inner().Relu(params);
}

absl::Status ObservedBackend::RopeAndKvWrite(const RopeAndKvWriteParams& params) {
  return skip() ? absl::OkStatus() : inner().RopeAndKvWrite(params);
}

absl::Status ObservedBackend::PagedAttention(const PagedAttentionParams& params) {
  before_attention_ = false;
  if (done_) return absl::OkStatus();
  if (attention_ == nullptr) return inner().PagedAttention(params);
  return CopyToDevice(params.out, attention_,
                      int64_t{params.batch.num_tokens} * params.num_heads * params.head_dim *
                          DTypeBytes(info().activation_dtype));
}

absl::Status ObservedBackend::SiluAndMul(const SiluAndMulParams& params) {
  return skip() ? absl::OkStatus() : inner().SiluAndMul(params);
}

absl::Status ObservedBackend::GatherRows(const GatherRowsParams& params) {
  return skip() ? absl::OkStatus() : inner().GatherRows(params);
}

absl::Status ObservedBackend::SampleTokens(const SampleTokensParams& params) {
  return skip() ? absl::OkStatus() : inner().SampleTokens(params);
}

}  // namespace flashquant
