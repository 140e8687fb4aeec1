// Sampler of the CPU backend (target F12). Input: sizes and parameters of one to three rows, then
// logits as any four bytes each: NaN, infinities and denormal numbers among them.
//
// Properties: a row is reported as not finite exactly when one of its logits is; else its token is
// in the vocabulary and not banned; greedy rows without penalties draw the greatest logit; a row
// gets the same token alone; probabilities of a whole vocabulary sum to one.
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/op_params.h"
#include "tests/fuzz/fuzz_input.h"

namespace flashquant {
namespace {

struct Draw {
  std::vector<int32_t> token_ids;
  std::vector<uint8_t> non_finite;
  std::vector<TokenLogprob> logprobs;
};

struct Batch {
  int32_t vocab_size = 0;
  std::vector<SampleRow> rows;
  std::vector<float> logits;  // [rows, V]
  std::vector<int32_t> banned;
  std::vector<TokenCount> counts;
  std::vector<TokenBias> biases;
};

Draw Sample(const Batch& batch, size_t first_row, size_t num_rows) {
  static ThreadPool pool(1);
  const auto vocab = static_cast<size_t>(batch.vocab_size);
  const auto begin = batch.logits.begin() + static_cast<int64_t>(first_row * vocab);
  std::vector<float> logits(begin, begin + static_cast<int64_t>(num_rows * vocab));
  std::vector<float> scratch(logits.size());
  Draw draw;
  draw.token_ids.resize(num_rows, -7);
  draw.non_finite.resize(num_rows, 7);
  draw.logprobs.resize(num_rows * kLogprobsPerRow);
  SampleTokensParams params;
  params.num_rows = static_cast<int32_t>(num_rows);
  params.vocab_size = batch.vocab_size;
  params.logits = logits.data();
  params.rows = batch.rows.data() + first_row;
  params.banned_ids = batch.banned.data();
  params.token_counts = batch.counts.data();
  params.biases = batch.biases.data();
  params.token_ids = draw.token_ids.data();
  params.non_finite = draw.non_finite.data();
  params.scratch = scratch.data();
  params.logprobs = draw.logprobs.data();
  SampleTokensCpu(params, pool);
  return draw;
}

// A value of 0 .. 1 in steps, the ends among them.
float Fraction(FuzzInput* input) { return static_cast<float>(input->Byte()) / 255.0f; }

// Distinct ids, fewer than the vocabulary.
std::set<int32_t> Ids(FuzzInput* input, int32_t vocab_size) {
  std::set<int32_t> ids;
  const int32_t count = input->Number(0, std::min(vocab_size - 1, 8));
  for (int32_t i = 0; i < count; ++i) ids.insert(input->Number(0, vocab_size - 1));
  return ids;
}

SampleRow Row(FuzzInput* input, Batch* batch) {
  SampleRow row;
  row.temperature = 2.0f * Fraction(input);
  row.top_p = std::max(Fraction(input), std::numeric_limits<float>::min());
  row.min_p = input->Chance(2) ? 0.0f : Fraction(input);
  row.top_k = input->Number(0, batch->vocab_size);
  row.seed = input->Word();
  row.output_position = input->Number(0, 300);
  row.top_logprobs = input->Number(-1, kMaxTopLogprobs);
  const auto size_of = [](const auto& list) { return static_cast<int32_t>(list.size()); };
  row.banned_begin = size_of(batch->banned);
  for (const int32_t id : Ids(input, batch->vocab_size)) batch->banned.push_back(id);
  row.banned_end = size_of(batch->banned);
  row.counts_begin = size_of(batch->counts);
  row.biases_begin = size_of(batch->biases);
  if (input->Chance(2)) {
    row.repetition_penalty = 0.01f + 1.99f * Fraction(input);
    row.presence_penalty = 4.0f * Fraction(input) - 2.0f;
    row.frequency_penalty = 4.0f * Fraction(input) - 2.0f;
    for (const int32_t id : Ids(input, batch->vocab_size)) {
      batch->counts.push_back({id, input->Number(0, 1000)});
    }
    for (const int32_t id : Ids(input, batch->vocab_size)) {
      batch->biases.push_back({id, 200.0f * Fraction(input) - 100.0f});
    }
  }
  row.counts_end = size_of(batch->counts);
  row.biases_end = size_of(batch->biases);
  return row;
}

float Logit(FuzzInput* input, uint8_t style) {
  if (style % 4 == 0) return std::bit_cast<float>(input->Word());
  if (style % 4 == 1) return static_cast<float>(input->Number(-3, 3));  // many alike
  return static_cast<float>(input->Number(0, 65535) - 32768) / 1024.0f;
}

void CheckLogprobs(const SampleRow& row, const TokenLogprob* logprobs, int32_t vocab_size) {
  double sum = 0.0;
  for (int32_t i = 1; i <= row.top_logprobs; ++i) {
    if (i > vocab_size) {
      Require(logprobs[i].token_id == -1, "more alternatives than tokens");
      continue;
    }
    Require(logprobs[i].logprob <= 1e-4f, "logprob above 0");
    Require(i == 1 || logprobs[i].logprob <= logprobs[i - 1].logprob, "not the likeliest first");
    sum += std::exp(static_cast<double>(logprobs[i].logprob));
  }
  Require(sum <= 1.001, "probabilities of more than one");
  if (row.top_logprobs >= vocab_size) Require(sum >= 0.999, "probabilities of less than one");
}

void CheckRow(const Batch& batch, size_t index, int32_t token, bool non_finite,
              const TokenLogprob* logprobs) {
  const SampleRow& row = batch.rows[index];
  const float* logits = batch.logits.data() + index * static_cast<size_t>(batch.vocab_size);
  bool finite = true;
  for (int32_t id = 0; id < batch.vocab_size; ++id) finite = finite && std::isfinite(logits[id]);
  Require(non_finite == !finite, "finite or not");
  Require(token >= 0 && token < batch.vocab_size, "token outside the vocabulary");
  if (non_finite) {
    Require(token == 0, "token of a row that is not finite");
    return;
  }
  std::set<int32_t> banned(batch.banned.begin() + row.banned_begin,
                           batch.banned.begin() + row.banned_end);
  Require(!banned.contains(token), "banned token");
  if (row.top_logprobs >= 0) {
    Require(logprobs[0].token_id == token, "logprob of another token");
    CheckLogprobs(row, logprobs, batch.vocab_size);
  }
  const bool plain = row.counts_begin == row.counts_end && row.biases_begin == row.biases_end;
  if (!plain || (row.temperature != 0.0f && row.top_k != 1)) return;
  for (int32_t id = 0; id < batch.vocab_size; ++id) {
    Require(banned.contains(id) || logits[id] <= logits[token], "greedy, but not the greatest");
  }
}

void RunOne(FuzzInput input) {
  Batch batch;
  const auto num_rows = static_cast<size_t>(input.Number(1, 3));
  batch.vocab_size = input.Number(1, 100);
  const uint8_t style = input.Byte();
  for (size_t i = 0; i < num_rows; ++i) batch.rows.push_back(Row(&input, &batch));
  for (size_t i = 0; i < num_rows * static_cast<size_t>(batch.vocab_size); ++i) {
    batch.logits.push_back(Logit(&input, style));
  }
  const Draw all = Sample(batch, 0, num_rows);
  for (size_t i = 0; i < num_rows; ++i) {
    CheckRow(batch, i, all.token_ids[i], all.non_finite[i] != 0,
             all.logprobs.data() + i * kLogprobsPerRow);
    const Draw alone = Sample(batch, i, 1);
    Require(alone.token_ids[0] == all.token_ids[i], "another token than alone");
  }
}

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashquant::RunOne({data, size});
  return 0;
}
