#include "engine/model/text_scorer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int32_t kBlockTokens = 16;
constexpr int32_t kLogitRows =
    64;  // positions per pass through the head: bounds the logits' memory

// ln(sum(exp(logits))), in double around the maximum.
double LogSumExp(std::span<const float> logits) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - max);
  return static_cast<double>(max) + std::log(sum);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TextScorer>> TextScorer::Create(const DecoderModel* model,
                                                               Backend* backend,
                                                               int32_t max_tokens) {
  const ModelConfig& config = model->config();
  const int32_t num_blocks = CeilDiv(max_tokens, kBlockTokens);
  std::unique_ptr<TextScorer> scorer(new TextScorer(model, backend, max_tokens));
  FQ_ASSIGN_OR_RETURN(scorer->cache_, KvCache::Create(backend, {.num_layers = config.num_layers,
                                                                .num_blocks = num_blocks + 1,
                                                                .block_tokens = kBlockTokens,
                                                                .num_kv_heads = config.num_kv_heads,
                                                                .head_dim = config.head_dim}));
  FQ_ASSIGN_OR_RETURN(scorer->activations_,
                      Activations::Create(backend, config, max_tokens, kLogitRows));
  FQ_ASSIGN_OR_RETURN(scorer->batch_, BatchInput::Create(backend, {.max_rows = max_tokens,
                                                                   .max_sequences = 1,
                                                                   .max_blocks = num_blocks,
                                                                   .block_tokens = kBlockTokens}));
  scorer->block_ids_.resize(static_cast<size_t>(num_blocks));
  std::iota(scorer->block_ids_.begin(), scorer->block_ids_.end(), kNullBlock + 1);

  std::vector<int32_t> rows(static_cast<size_t>(max_tokens));
  std::iota(rows.begin(), rows.end(), 0);
  const auto rows_bytes = static_cast<int64_t>(rows.size() * sizeof(int32_t));
  FQ_ASSIGN_OR_RETURN(scorer->row_indices_, backend->Allocate(rows_bytes));
  FQ_RETURN_IF_ERROR(backend->CopyToDevice(scorer->row_indices_.data(), rows.data(), rows_bytes));
  return scorer;
}

absl::Status TextScorer::VisitLogits(std::span<const int32_t> tokens, const Visitor& visit) {
  const int32_t vocab_size = model_->config().vocab_size;
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  if (num_tokens < 1 || num_tokens > max_tokens_) {
    return InvalidArgumentError("window: must have 1 to {} tokens, got {}", max_tokens_,
                                num_tokens);
  }
  for (const int32_t id : tokens) {
    if (id < 0 || id >= vocab_size) {
      return InvalidArgumentError("window: token id out of range (limit {}, got {})",
                                  vocab_size - 1, id);
    }
  }
  StepPlan plan;
  plan.num_tokens = static_cast<int32_t>(num_tokens);
  plan.num_rows = plan.num_tokens;
  plan.phase = StepPhase::kPrefill;
  plan.sequences.push_back({.token_ids = tokens, .block_ids = block_ids_});
  FQ_RETURN_IF_ERROR(batch_->Load(plan));
  FQ_RETURN_IF_ERROR(model_->Forward(*batch_, nullptr, *cache_, activations_.get()));

  std::vector<float> logits(static_cast<size_t>(kLogitRows) * static_cast<size_t>(vocab_size));
  for (int32_t first = 0; first < plan.num_tokens; first += kLogitRows) {
    const int32_t rows = std::min(kLogitRows, plan.num_tokens - first);
    FQ_RETURN_IF_ERROR(
        model_->ComputeLogits(row_indices_.As<int32_t>() + first, rows, activations_.get()));
    FQ_RETURN_IF_ERROR(
        backend_->CopyToHost(logits.data(), activations_->logits.data(),
                             static_cast<int64_t>(rows) * vocab_size * DTypeBytes(DType::kF32)));
    FQ_RETURN_IF_ERROR(backend_->Synchronize());
    for (int32_t row = 0; row < rows; ++row) {
      visit(first + row,
            std::span(logits).subspan(static_cast<size_t>(row) * static_cast<size_t>(vocab_size),
                                      static_cast<size_t>(vocab_size)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<double> TextScorer::NegativeLogLikelihood(std::span<const int32_t> tokens,
                                                         int32_t first) {
  double sum = 0;
  FQ_RETURN_IF_ERROR(VisitLogits(tokens, [&](int32_t position, std::span<const float> logits) {
    const size_t next = static_cast<size_t>(position) + 1;
    if (position + 1 < first || next == tokens.size()) return;
    sum += LogSumExp(logits) - logits[static_cast<size_t>(tokens[next])];
  }));
  return sum;
}

}  // namespace flashquant
