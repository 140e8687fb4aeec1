// StageBackend: a backend that runs a model as another one does, but leaves stages of a step out,
// so that benchmarks see what each of them takes: the step's time without it is compared with the
// whole step's.
#pragma once

#include <cstdint>
#include <functional>

#include "kernels/forwarding_backend.h"

namespace flashquant {

enum class Stage : uint8_t { kLinears, kAttention, kPointwise, kHead, kSampling };
inline constexpr int kNumStages = 5;

class StageBackend final : public ForwardingBackend {
 public:
  // `inner` outlives the object and everything made through it.
  explicit StageBackend(Backend* inner) : ForwardingBackend(inner) {}

  // Results mean nothing while a stage is left out.
  void LeaveOut(Stage stage) { left_out_ = 1u << static_cast<unsigned>(stage); }
  void LeaveNothingOut() { left_out_ = 0; }
  // The linear layer that is Stage::kHead.
  void SetHead(const LinearWeight* head) { head_ = head; }

  absl::Status QueueReadBack(int32_t slot, const void* device, int64_t num_bytes) override {
    return inner().QueueReadBack(slot, device, num_bytes);
  }
  absl::Status FinishReadBack(int32_t slot, void* host) override {
    return inner().FinishReadBack(slot, host);
  }
  absl::Status RecordMark(int32_t slot, int32_t mark) override {
    return inner().RecordMark(slot, mark);
  }
  double SecondsBetweenMarks(int32_t slot, int32_t first, int32_t last) const override {
    return inner().SecondsBetweenMarks(slot, first, last);
  }
  absl::Status Embedding(const EmbeddingParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner().Embedding(params); });
  }
  absl::Status RmsNorm(const RmsNormParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner().RmsNorm(params); });
  }
  absl::Status LayerNorm(const LayerNormParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner().LayerNorm(params); });
  }
  absl::Status HeadNorm(const HeadNormParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner().HeadNorm(params); });
  }
  absl::Status AddPositions(const AddPositionsParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner().AddPositions(params); });
  }
  absl::Status Relu(const ReluParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner().Relu(params); });
  }
  absl::Status Linear(const LinearParams& params) override {
    return Run(params.weight == head_ ? Stage::kHead : Stage::kLinears,
               [&] { return inner().Linear(params); });
  }
  absl::Status RopeAndKvWrite(const RopeAndKvWriteParams& params) override {
    return Run(Stage::kAttention, [&] { return inner().RopeAndKvWrite(params); });
  }
  absl::Status PagedAttention(const PagedAttentionParams& params) override {
    return Run(Stage::kAttention, [&] { return inner().PagedAttention(params); });
  }
  absl::Status RopeAndAttention(const RopeAndKvWriteParams& rope,
                                const PagedAttentionParams& attention) override {
    return Run(Stage::kAttention, [&] { return inner().RopeAndAttention(rope, attention); });
  }
  absl::Status SiluAndMul(const SiluAndMulParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner().SiluAndMul(params); });
  }
  absl::Status GatherRows(const GatherRowsParams& params) override {
    return Run(Stage::kPointwise, [&] { return inner().GatherRows(params); });
  }
  absl::Status SampleTokens(const SampleTokensParams& params) override {
    return Run(Stage::kSampling, [&] { return inner().SampleTokens(params); });
  }
  absl::Status RunRecorded(const void* owner, int64_t key,
                           const std::function<absl::Status()>& queue) override {
    return inner().RunRecorded(owner, (key << kNumStages) + left_out_, queue);
  }

 private:
  template <typename Op>
  absl::Status Run(Stage stage, const Op& op) const {
    if ((left_out_ >> static_cast<unsigned>(stage) & 1u) != 0) return absl::OkStatus();
    return op();
  }

  const LinearWeight* head_ = nullptr;
  uint32_t left_out_ = 0;
};

}  // namespace flashquant
