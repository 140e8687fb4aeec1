// TextScorer: teacher-forced logits of a whole window of tokens, for perplexity and for parity with
// references.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "engine/model/decoder_model.h"

namespace flashquant {

class TextScorer final {
 public:
  // For windows of at most `max_tokens` tokens. `model` and `backend` must outlive the scorer.
  static absl::StatusOr<std::unique_ptr<TextScorer>> Create(const DecoderModel* model,
                                                            Backend* backend, int32_t max_tokens);

  // Told the logits [V] after each position of the window, in order; the span is valid during the
  // call.
  using Visitor = std::function<void(int32_t position, std::span<const float> logits)>;

  // Runs the window from an empty context. INVALID_ARGUMENT for a window that is empty, too long or
  // has an id outside the vocabulary.
  absl::Status VisitLogits(std::span<const int32_t> tokens, const Visitor& visit);

  // Sum over tokens `first`.. of -ln p(token | the ones before it in the window); first >= 1.
  absl::StatusOr<double> NegativeLogLikelihood(std::span<const int32_t> tokens, int32_t first = 1);

 private:
  TextScorer(const DecoderModel* model, Backend* backend, int32_t max_tokens)
      : model_(model), backend_(backend), max_tokens_(max_tokens) {}

  const DecoderModel* const model_;
  Backend* const backend_;
  const int32_t max_tokens_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Activations> activations_;
  std::unique_ptr<BatchInput> batch_;
  std::vector<int32_t> block_ids_;
  DeviceBuffer row_indices_;  // 0, 1, 2, ... max_tokens - 1
};

}  // namespace flashquant
