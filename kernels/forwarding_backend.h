// ForwardingBackend: a backend that does everything as another one: the base of those that change,
// watch or leave out some of it. Recording, read-backs and marks are Backend's own defaults.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "kernels/backend.h"

namespace flashquant {

class ForwardingBackend : public Backend {
 public:
  // `inner` outlives the object and everything made through it.
  explicit ForwardingBackend(Backend* inner) : inner_(inner) {}

  BackendInfo info() const override { return inner_->info(); }
  absl::StatusOr<DeviceBuffer> Allocate(int64_t num_bytes) override {
    return inner_->Allocate(num_bytes);
  }
  absl::Status CopyToDevice(void* device, const void* host, int64_t num_bytes) override {
    return inner_->CopyToDevice(device, host, num_bytes);
  }
  absl::Status CopyToHost(void* host, const void* device, int64_t num_bytes) override {
    return inner_->CopyToHost(host, device, num_bytes);
  }
  absl::Status Synchronize() override { return inner_->Synchronize(); }
  absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(
      std::span<const LinearPart> parts) override {
    return inner_->PackLinear(parts);
  }
  absl::Status Embedding(const EmbeddingParams& params) override {
    return inner_->Embedding(params);
  }
  absl::Status RmsNorm(const RmsNormParams& params) override { return inner_->RmsNorm(params); }
  absl::Status LayerNorm(const LayerNormParams& params) override {
    return inner_->LayerNorm(params);
  }
  absl::Status HeadNorm(const HeadNormParams& params) override { return inner_->HeadNorm(params); }
  absl::Status AddPositions(const AddPositionsParams& params) override {
    return inner_->AddPositions(params);
  }
  absl::Status Relu(const ReluParams& params) override { return inner_->Relu(params); }
  absl::Status Linear(const LinearParams& params) override { return inner_->Linear(params); }
  absl::Status RopeAndKvWrite(const RopeAndKvWriteParams& params) override {
    return inner_->RopeAndKvWrite(params);
  }
  absl::Status PagedAttention(const PagedAttentionParams& params) override {
    return inner_->PagedAttention(params);
  }
  absl::Status SiluAndMul(const SiluAndMulParams& params) override {
    return inner_->SiluAndMul(params);
  }
  absl::Status GatherRows(const GatherRowsParams& params) override {
    return inner_->GatherRows(params);
  }
  absl::Status SampleTokens(const SampleTokensParams& params) override {
    return inner_->SampleTokens(params);
  }
  absl::Status PlanAttention(const AttentionBatch& host_batch) override {
    return inner_->PlanAttention(host_batch);
  }

 protected:
  Backend& inner() const { return *inner_; }
  // Buffers are freed through the backend that made them, which is never this one.
  void Free(void*, int64_t) override {}

 private:
  Backend* const inner_;
};

}  // namespace flashquant
