#include "engine/quantize/observed_backend.h"

namespace flashquant {

absl::Status ObservedBackend::Embedding(const EmbeddingParams& params) {
  done_ = false;
  before_attention_ = true;
  if (embeddings_ == nullptr) return inner().Embedding(params);
  return CopyRows(embeddings_, params.num_tokens, static_cast<int32_t>(params.table->k()),
                  params.out);
}

absl::Status ObservedBackend::Linear(const LinearParams& params) {
  if (skip()) return absl::OkStatus();
  if (params.weight != observed_ || observed_ == nullptr) return inner().Linear(params);
  done_ = true;
  return observer_(params.x, params.num_rows);
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
  return CopyRows(attention_, params.batch.num_tokens, params.num_heads * params.head_dim,
                  params.out);
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
