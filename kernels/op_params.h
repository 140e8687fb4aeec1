// One plain struct per op, shared by the CPU and the CUDA backend.
//
// Pointers are backend memory (Backend::Allocate) unless marked host. Matrices are row-major. "act"
// is the backend's activation type: FP32 on the CPU, BF16 on CUDA. Letters: M rows (tokens of the
// step, padding included), K input features, N output features, H query heads, H_kv KV heads, D
// head dim, V vocabulary. All ops are asynchronous in order on the backend's stream. Rows are
// independent: what one row computes does not depend, to the last bit on the CPU, on the other rows
// or on M.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/token_values.h"
#include "kernels/format/paged_kv.h"

namespace flashquant {

class LinearWeight;

// out[i, :] = table row of token i. The id of token i is token_ids[i], or, when previous_rows[i] >=
// 0, previous_tokens[previous_rows[i]]: the id that the step before sampled and that the host has
// not seen yet.
struct EmbeddingParams {
  int32_t num_tokens = 0;
  const int32_t* token_ids = nullptr;        // [num_tokens], 0 <= id < V
  const int32_t* previous_rows = nullptr;    // [num_tokens], -1 = use token_ids
  const int32_t* previous_tokens = nullptr;  // sampled ids of the step before
  const LinearWeight* table = nullptr;       // dense, N = V rows of K = hidden
  void* out = nullptr;                       // [num_tokens, hidden] act
};

// residual += x (when residual is set); out = normalised(residual or x) * weight.
struct RmsNormParams {
  int32_t num_rows = 0;
  int32_t hidden = 0;
  float epsilon = 1e-5f;
  const void* x = nullptr;       // [num_rows, hidden] act
  void* residual = nullptr;      // [num_rows, hidden] act, updated in place; may be null
  const void* weight = nullptr;  // [hidden] FP32
  void* out = nullptr;           // [num_rows, hidden] act; may alias x
};

// As RmsNormParams, with the mean taken out first and a bias: LayerNorm.
struct LayerNormParams {
  int32_t num_rows = 0;
  int32_t hidden = 0;
  float epsilon = 1e-5f;
  const void* x = nullptr;       // [num_rows, hidden] act
  void* residual = nullptr;      // [num_rows, hidden] act, updated in place; may be null
  const void* weight = nullptr;  // [hidden] FP32
  const void* bias = nullptr;    // [hidden] FP32
  void* out = nullptr;           // [num_rows, hidden] act; may alias x
};

// RMSNorm of each query and key head by itself, in place; values are left alone.
struct HeadNormParams {
  int32_t num_tokens = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  float epsilon = 1e-6f;
  void* qkv = nullptr;             // [num_tokens, (H + 2 H_kv) * D] act: q, then k, then v
  const void* q_weight = nullptr;  // [D] FP32, shared by the heads
  const void* k_weight = nullptr;  // [D] FP32
};

// x[i, :] += table[positions[i], :].
struct AddPositionsParams {
  int32_t num_tokens = 0;
  int32_t hidden = 0;
  const int32_t* positions = nullptr;  // [num_tokens], each a row of the table
  const float* table = nullptr;        // [any, hidden]
  void* x = nullptr;                   // [num_tokens, hidden] act
};

// x = max(x, 0) in place; NaN stays.
struct ReluParams {
  int64_t count = 0;
  void* x = nullptr;  // [count] act
};

// y[M, N] = x[M, K] * (dequant(W_Q) + W_O) + bias, or the dense weight's product; overwrites y.
struct LinearParams {
  int32_t num_rows = 0;                  // M >= 1
  const LinearWeight* weight = nullptr;  // K and N
  const void* x = nullptr;               // [M, K] act
  void* y = nullptr;                     // [M, N] y_dtype
  DType y_dtype = DType::kF32;  // act, or FP32 for logits, perhaps of values rounded to act
};

// What an FP8 KV cache's elements are multiplied by when they are read, above 0; not looked at with
// another type of cache.
struct KvScales {
  float k = 1.0f;
  float v = 1.0f;
};

// Rotates q and k in place (Hugging Face's half-split pairing: i with i + D/2) and writes k and v
// of each token to its KV slot.
struct RopeAndKvWriteParams {
  int32_t num_tokens = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  void* qkv = nullptr;                 // [num_tokens, (H + 2 H_kv) * D] act: q, then k, then v
  const int32_t* positions = nullptr;  // [num_tokens]
  const int64_t* slots = nullptr;      // [num_tokens]; -1 = padding row, nothing is written
  const float* cos_sin = nullptr;      // [max positions, D]: D/2 cosines, then D/2 sines
  PagedKvGeometry kv;
  KvScales kv_scales = {};
  void* k_cache = nullptr;  // this layer's arrays
  void* v_cache = nullptr;
};

// The sequences of a step, for attention; arrays in backend memory. Sequence s owns query rows
// query_indptr[s] .. query_indptr[s + 1) and the blocks block_ids[block_indptr[s] ..]. Its query
// rows are the last ones of its context: row j of q rows sits at position context_lengths[s] - q +
// j. A context length of 0 is padding: the sequence has nothing, and its rows are left as they are.
struct AttentionBatch {
  int32_t num_sequences = 0;
  int32_t num_tokens = 0;                    // query rows, padding excluded
  const int32_t* query_indptr = nullptr;     // [num_sequences + 1]
  const int32_t* context_lengths = nullptr;  // [num_sequences], this step's tokens included
  const int32_t* block_indptr = nullptr;     // [num_sequences + 1]
  const int32_t* block_ids = nullptr;        // [block_indptr[num_sequences]]
};

// Causal grouped-query attention of each query row over its sequence's cached keys and values.
struct PagedAttentionParams {
  AttentionBatch batch;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  float softmax_scale = 1.0f;
  int32_t sliding_window = 0;  // keys seen, the row itself included; 0 = all
  const void* qkv = nullptr;   // as RopeAndKvWriteParams, q rotated; row stride (H + 2 H_kv) * D
  PagedKvGeometry kv;
  KvScales kv_scales = {};
  const void* k_cache = nullptr;
  const void* v_cache = nullptr;
  void* out = nullptr;  // [num_tokens, H * D] act; padding rows are left as they are
};

// out = silu(gate) * up.
struct SiluAndMulParams {
  int32_t num_rows = 0;
  int32_t intermediate = 0;
  const void* gate_up = nullptr;  // [num_rows, 2 * intermediate] act: gate, then up
  void* out = nullptr;            // [num_rows, intermediate] act
};

// out[i, :] = in[row_indices[i], :].
struct GatherRowsParams {
  int32_t num_rows = 0;
  int32_t hidden = 0;
  const int32_t* row_indices = nullptr;  // [num_rows]
  const void* in = nullptr;              // [any, hidden] act
  void* out = nullptr;                   // [num_rows, hidden] act
};

// Temperatures below this are greedy: the draw could not differ but between equal logits.
inline constexpr float kGreedyTemperature = 1e-5f;

// How to draw one row's token. temperature 0 (and all below kGreedyTemperature) = greedy (lowest id
// wins ties); top_k 0 = off; top_p 1 = off; min_p 0 = off.
//
// In this order: of each token t of the row's token_counts, with logit l and n outputs,
//   l > 0: l / repetition_penalty, else l * repetition_penalty;
//   l - n * frequency_penalty - (n > 0 ? presence_penalty : 0);
// then the row's biases are added, banned ids are taken out, and temperature, top_k, top_p and
// min_p apply. What penalties and biases give is kept within the finite numbers. The draw depends
// only on (seed, output_position), the row's logits and these values.
struct SampleRow {
  float temperature = 1.0f;
  float top_p = 1.0f;
  float min_p = 0.0f;
  int32_t top_k = 0;
  uint64_t seed = 0;
  int64_t output_position = 0;  // index of the drawn token among the request's outputs
  int32_t banned_begin = 0;  // range of SampleTokensParams::banned_ids that this row must not draw
  int32_t banned_end = 0;
  float repetition_penalty = 1.0f;  // a normal number above 0
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  int32_t counts_begin = 0;  // range of SampleTokensParams::token_counts, each id once
  int32_t counts_end = 0;
  int32_t biases_begin = 0;  // range of SampleTokensParams::biases, each id once
  int32_t biases_end = 0;
  int32_t top_logprobs = -1;  // -1 = no logprobs, else 0 .. kMaxTopLogprobs
};

inline constexpr int32_t kLogprobsPerRow = 1 + kMaxTopLogprobs;

// One token per row. A row whose logits are not all finite gets token 0 and non_finite 1.
//
// A row that asks for logprobs gets them of its logits as they came in: the chosen token's, then
// those of the top_logprobs greatest, highest first, lower id first among equal ones; ids of -1
// where the vocabulary ends. Void for a row that is not finite.
struct SampleTokensParams {
  int32_t num_rows = 0;
  int32_t vocab_size = 0;
  float* logits = nullptr;          // [num_rows, V] FP32; may be overwritten
  const SampleRow* rows = nullptr;  // [num_rows]
  const int32_t* banned_ids = nullptr;
  const TokenCount* token_counts = nullptr;
  const TokenBias* biases = nullptr;
  int32_t* token_ids = nullptr;   // [num_rows] out
  uint8_t* non_finite = nullptr;  // [num_rows] out
  // Both needed when a row asks for logprobs.
  float* scratch = nullptr;          // [num_rows, V] FP32
  TokenLogprob* logprobs = nullptr;  // [num_rows, kLogprobsPerRow] out, rows that ask only
};

}  // namespace flashquant
