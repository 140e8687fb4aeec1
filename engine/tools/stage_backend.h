// StageBackend: a backend that runs a model as another one does, but leaves stages of a step out,
// so that benchmarks see what each of them takes: the step's time without it is compared with the
// whole step's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "kernels/backend.h"

namespace flashquant {

enum class Stage : uint8_t { kLinears, kAttention, kPointwise, kHead, kSampling };
inline constexpr int kNumStages = 5;

class StageBackend final : public Backend {
 public:
  // `inner` outlives the object and everything made through it.
  explicit StageBackend(Backend* inner) : inner_(inner) {}

  // Results mean nothing while a stage is left out.
  void LeaveOut(Stage stage) { left_out_ = 1u << static_cast<unsigned>(stage); }
  void LeaveNothingOut() { left_out_ = 0; }
  // The linear layer that is Stage::kHead.
  void SetHead(const LinearWeight* head) { head_ = head; }

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
  absl::Status QueueReadBack(int32_t slot, const void* device, int64_t num_bytes) override {
    return inner_->QueueReadBack(slot, device, num_bytes);
  }
  absl::Status FinishReadBack(int32_t slot, void* host) override {
    return inner_->FinishReadBack(slot, host);
  }
  absl::Status RecordMark(int32_t slot, int32_t mark) override {
    return inner_->RecordMark(slot, mark);
  }
  double SecondsBetweenMarks(int32_t slot, int32_t first, int32_t last) const override {
    return inner_->SecondsBetweenMarks(slot, first, last);
  }
  absl::Status Synchronize() override { return inner_->Synchronize(); }
  absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(
      std::span<const LinearPart> parts) override {
    return inner_->PackLinear(parts);
  }
  absl::Status Embedding(const EmbeddingParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner_->Embedding(params); });
  }
  absl::Status RmsNorm(const RmsNormParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner_->RmsNorm(params); });
  }
  absl::Status LayerNorm(const LayerNormParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner_->LayerNorm(params); });
  }
  absl::Status HeadNorm(const HeadNormParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner_->HeadNorm(params); });
  }
  absl::Status AddPositions(const AddPositionsParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner_->AddPositions(params); });
  }
  absl::Status Relu(const ReluParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner_->Relu(params); });
  }
  absl::Status Linear(const LinearParams& params) override {
    return Run(params.weight == head_ ? Stage::kHead : Stage::kLinears,
               [&] { return inner_->Linear(params); });
  }
  absl::Status RopeAndKvWrite(const RopeAndKvWriteParams& params) override {
    return Run(Stage::kAttention, [&] { return inner_->RopeAndKvWrite(params); });
  }
  absl::Status PagedAttention(const PagedAttentionParams& params) override {
    return Run(Stage::kAttention, [&] { return inner_->PagedAttention(params); });
  }
  absl::Status RopeAndAttention(const RopeAndKvWriteParams& rope,
                                const PagedAttentionParams& attention) override {
    return Run(Stage::kAttention, [&] { return inner_->RopeAndAttention(rope, attention); });
  }
  absl::Status SiluAndMul(const SiluAndMulParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner_->SiluAndMul(params); });
  }
  absl::Status GatherRows(const GatherRowsParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner_->GatherRows(params); });
  }
  absl::Status SampleTokens(const SampleTokensParams& params) override {
    return Run(Stage::kSampling, [&] { return inner_->SampleTokens(params); });
  }
  absl::Status PlanAttention(const AttentionBatch& host_batch) override {
    return inner_->PlanAttention(host_batch);
  }
  absl::Status RunRecorded(const void* owner, int64_t key,
                           const std::function<absl::Status()>& queue) override {
    return inner_->RunRecorded(owner, (key << kNumStages) + left_out_, queue);
  }

 protected:
  // Buffers are freed through the backend that made them, which is never this one.
  void Free(void*, int64_t) override {}

 private:
  template <typename Op>
  absl::Status Run(Stage stage, const Op& op) const {
    if ((left_out_ >> static_cast<unsigned>(stage) & 1u) != 0) return absl::OkStatus();
    return op();
  }

  Backend* const inner_;
  const LinearWeight* head_ = nullptr;
  uint32_t left_out_ = 0;
};

}  // namespace flashquant
