// Embedding lookup in a packed table, and GatherRows. Memory-bound copies: no SIMD code.
#include "kernels/cpu/packed_linear.h"

#include <algorithm>
#include <atomic>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_kernels.h"

namespace flashquant {
namespace {

float WeightAt(PackedKind kind, uint32_t word, int64_t k) {
  switch (kind) {
    case PackedKind::kBFloat16:
      return ToFloat(BFloat16{static_cast<uint16_t>(word >> (k % 2 * 16))});
    case PackedKind::kInt8:
      return static_cast<float>(static_cast<int8_t>(word >> (k % 4 * 8)));
    default:
      return std::bit_cast<float>(word);
  }
}

}  // namespace

void UnpackRow(const PackedLinear& table, int64_t row, float* out) {
  for (const PackedSegment& segment : table.segments()) {
    const int64_t n = row - segment.n_begin;
    if (n < 0 || n >= segment.n) continue;
    const int64_t per_word = CodesPerWord(segment.kind);
    const uint32_t* words =
        segment.words.As<uint32_t>() + n / kBlockLanes * segment.words_per_block + n % kBlockLanes;
    for (int64_t k = 0; k < table.k(); ++k) {
      out[k] = WeightAt(segment.kind, words[k / per_word * kBlockLanes], k);
    }
    if (segment.kind == PackedKind::kInt8) {
      const float scale = ToFloat(segment.scales.As<BFloat16>()[n]);
      for (int64_t k = 0; k < table.k(); ++k) out[k] *= scale;
    }
    return;
  }
}

absl::Status EmbeddingCpu(const EmbeddingParams& params, ThreadPool& pool) {
  const auto& table = static_cast<const PackedLinear&>(*params.table);
  for (const PackedSegment& segment : table.segments()) {
    if (segment.kind == PackedKind::kInt4) {
      return InvalidArgumentError("embedding table in INT4; BF16, F16, F32 or I8");
    }
  }
  std::atomic<int64_t> bad_token{-1};
  ForRows(pool, params.num_tokens, table.k(), [&](int64_t token) {
    const int32_t previous = params.previous_rows == nullptr ? -1 : params.previous_rows[token];
    const int64_t id = previous >= 0 ? params.previous_tokens[previous] : params.token_ids[token];
    if (id < 0 || id >= table.n()) {
      bad_token.store(token, std::memory_order_relaxed);
      return;
    }
    UnpackRow(table, id, static_cast<float*>(params.out) + token * table.k());
  });
  if (bad_token.load() >= 0) {
    return InvalidArgumentError("token {} of the step: id outside the vocabulary of {}",
                                bad_token.load(), table.n());
  }
  return absl::OkStatus();
}

void GatherRowsCpu(const GatherRowsParams& params, ThreadPool& pool) {
  const int64_t hidden = params.hidden;
  ForRows(pool, params.num_rows, hidden, [&](int64_t row) {
    std::copy_n(static_cast<const float*>(params.in) + params.row_indices[row] * hidden, hidden,
                static_cast<float*>(params.out) + row * hidden);
  });
}

}  // namespace flashquant
