// Sampling: penalties and biases, temperature, top-k, top-p, min-p, one seeded draw per row, and
// logprobs.
//
// The vocabulary is never sorted whole: top-k keeps a heap of k candidates in one scan, top-p asks
// for the best 64 and more only when they do not hold enough probability. Without either the draw
// walks the ids in order. The random number is Philox4x32-10 (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3") of (seed, output position) and nothing else. A row that asks for
// logprobs is drawn in a copy, because they are those of the logits as they came in.
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sample_tokens.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/cpu/cpu_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

bool AllFinite(const float* logits, int64_t size) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d);  // of x - x: 0, or NaN once x is not finite
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) {
    const auto x = hn::LoadU(d, logits + i);
    sum = hn::Add(sum, hn::Sub(x, x));
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < size; ++i) total += logits[i] - logits[i];
  return total == 0.0f;
}

float MaxLogit(const float* logits, int64_t size) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto max = hn::Set(d, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) max = hn::Max(max, hn::LoadU(d, logits + i));
  float result = hn::GetLane(hn::MaxOfLanes(d, max));
  for (; i < size; ++i) result = std::max(result, logits[i]);
  return result;
}

// out[i] = exp((logits[i] - max) / temperature), at most 1; out may be logits. Returns their sum.
float Weights(const float* logits, int64_t size, float max, float inverse_temperature, float* out) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto max_logit = hn::Set(d, max);
  const auto factor = hn::Set(d, inverse_temperature);
  auto sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) {
    const auto weight = hn::Exp(d, hn::Mul(hn::Sub(hn::LoadU(d, logits + i), max_logit), factor));
    sum = hn::Add(sum, weight);
    hn::StoreU(weight, d, out + i);
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < size; ++i) {
    out[i] = std::exp((logits[i] - max) * inverse_temperature);
    total += out[i];
  }
  return total;
}

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashquant {
namespace {

HWY_EXPORT(AllFinite);
HWY_EXPORT(MaxLogit);
HWY_EXPORT(Weights);

// Ids whose weights are summed together, so that a draw looks at few of them.
constexpr int64_t kSumIds = 512;
constexpr int64_t kFirstTopP = 64;

struct Candidate {
  float logit = 0.0f;
  int32_t id = 0;
};

// The better candidate first: higher logit, then lower id.
bool Better(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// The `count` best candidates of a row, at most all, best first.
std::vector<Candidate> Best(const float* logits, int64_t vocab_size, int64_t count) {
  std::vector<Candidate> heap;  // worst of the kept at the front
  heap.reserve(static_cast<size_t>(count));
  for (int32_t id = 0; id < vocab_size && count > 0; ++id) {
    const Candidate candidate{logits[id], id};
    if (static_cast<int64_t>(heap.size()) < count) {
      heap.push_back(candidate);
      std::push_heap(heap.begin(), heap.end(), Better);
    } else if (Better(candidate, heap.front())) {
      std::pop_heap(heap.begin(), heap.end(), Better);
      heap.back() = candidate;
      std::push_heap(heap.begin(), heap.end(), Better);
    }
  }
  std::sort_heap(heap.begin(), heap.end(), Better);
  return heap;
}

float KeepFinite(float logit) {
  return std::clamp(logit, std::numeric_limits<float>::lowest(), std::numeric_limits<float>::max());
}

// The logits of one row after its penalties and biases, in place.
void ApplyPenaltiesAndBiases(const SampleTokensParams& params, const SampleRow& row,
                             float* logits) {
  for (int32_t i = row.counts_begin; i < row.counts_end; ++i) {
    const TokenCount& count = params.token_counts[i];
    if (count.token_id < 0 || count.token_id >= params.vocab_size) continue;
    float& logit = logits[count.token_id];
    logit =
        KeepFinite(logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty);
    if (count.num_outputs == 0) continue;
    logit = KeepFinite(logit - (static_cast<float>(count.num_outputs) * row.frequency_penalty +
                                row.presence_penalty));
  }
  for (int32_t i = row.biases_begin; i < row.biases_end; ++i) {
    const TokenBias& bias = params.biases[i];
    if (bias.token_id < 0 || bias.token_id >= params.vocab_size) continue;
    logits[bias.token_id] = KeepFinite(logits[bias.token_id] + bias.bias);
  }
}

// Logprobs of `token_id` and of the row's `num_top` likeliest, into out[kLogprobsPerRow].
// `scratch`: [vocab_size].
void WriteLogprobs(const float* logits, int64_t vocab_size, int32_t token_id, int32_t num_top,
                   float* scratch, TokenLogprob* out) {
  const float max = HWY_DYNAMIC_DISPATCH(MaxLogit)(logits, vocab_size);
  HWY_DYNAMIC_DISPATCH(Weights)(logits, vocab_size, max, 1.0f, scratch);
  double total = 0.0;
  for (int64_t id = 0; id < vocab_size; ++id) total += scratch[id];
  const double log_total = std::log(total);
  const auto logprob = [&](int32_t id) {
    const double difference = static_cast<double>(logits[id]) - max;
    return TokenLogprob{id, KeepFinite(static_cast<float>(difference - log_total))};
  };
  out[0] = logprob(token_id);
  const std::vector<Candidate> top = Best(logits, vocab_size, num_top);
  for (int32_t i = 0; i < num_top; ++i) {
    const auto place = static_cast<size_t>(i);
    out[1 + i] = place < top.size() ? logprob(top[place].id) : TokenLogprob{-1, 0.0f};
  }
}

// Uniform in [0, 1) with 53 bits.
double UniformDraw(uint64_t seed, int64_t output_position) {
  const auto position = static_cast<uint64_t>(output_position);
  std::array<uint32_t, 4> counter = {static_cast<uint32_t>(position),
                                     static_cast<uint32_t>(position >> 32), 0, 0};
  std::array<uint32_t, 2> key = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{counter[0]} << 32) | counter[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

// One row being sampled.
class RowSampler {
 public:
  RowSampler(const SampleRow& row, float* logits, int64_t vocab_size)
      : row_(row), logits_(logits), vocab_size_(vocab_size) {}

  int32_t Sample(const int32_t* banned_ids) {
    Ban(banned_ids);
    max_ = HWY_DYNAMIC_DISPATCH(MaxLogit)(logits_, vocab_size_);
    // Written so that NaN is greedy too.
    if (!(row_.temperature >= kGreedyTemperature)) return Greedy();
    inverse_temperature_ = 1.0f / row_.temperature;
    const bool top_k = row_.top_k > 0 && row_.top_k < vocab_size_;
    if (top_k || row_.top_p < 1.0f) return DrawFromTop(top_k ? row_.top_k : vocab_size_, top_k);
    return DrawFromAll();
  }

 private:
  // A ban of every id is no ban: there must be something to draw.
  void Ban(const int32_t* banned_ids) {
    std::vector<float> saved;
    for (int32_t i = row_.banned_begin; i < row_.banned_end; ++i) {
      const int32_t id = banned_ids[i];
      if (id < 0 || id >= vocab_size_) continue;
      saved.push_back(logits_[id]);
      logits_[id] = -std::numeric_limits<float>::infinity();
    }
    if (static_cast<int64_t>(saved.size()) < vocab_size_) return;
    if (HWY_DYNAMIC_DISPATCH(MaxLogit)(logits_, vocab_size_) >
        -std::numeric_limits<float>::infinity()) {
      return;
    }
    // Backwards, so that an id banned twice gets its first, real logit.
    for (int32_t i = row_.banned_end; i-- > row_.banned_begin;) {
      const int32_t id = banned_ids[i];
      if (id < 0 || id >= vocab_size_) continue;
      logits_[id] = saved.back();
      saved.pop_back();
    }
  }

  int32_t Greedy() const {
    return static_cast<int32_t>(std::find(logits_, logits_ + vocab_size_, max_) - logits_);
  }

  double WeightOf(const Candidate& candidate) const {
    return std::exp((candidate.logit - max_) * inverse_temperature_);
  }

  double Draw() const { return UniformDraw(row_.seed, row_.output_position); }

  // Length of the shortest prefix that holds top_p of `total`; 0 when all together do not.
  size_t TopPCount(const std::vector<Candidate>& candidates, double total) const {
    double sum = 0.0;
    for (size_t i = 0; i < candidates.size(); ++i) {
      sum += WeightOf(candidates[i]);
      if (sum >= row_.top_p * total) return i + 1;
    }
    return 0;
  }

  int32_t DrawFromTop(int64_t limit, bool top_k) const {
    std::vector<Candidate> candidates;
    size_t count = 0;
    if (top_k) {
      candidates = Best(logits_, vocab_size_, limit);
      count = candidates.size();
      if (row_.top_p < 1.0f) {
        double total = 0.0;
        for (const Candidate& candidate : candidates) total += WeightOf(candidate);
        count = TopPCount(candidates, total);
      }
    } else {
      std::vector<float> weights(static_cast<size_t>(vocab_size_));
      const double total = HWY_DYNAMIC_DISPATCH(Weights)(logits_, vocab_size_, max_,
                                                         inverse_temperature_, weights.data());
      for (int64_t size = std::min(kFirstTopP, limit); count == 0;
           size = std::min(size * 8, limit)) {
        candidates = Best(logits_, vocab_size_, size);
        count = TopPCount(candidates, total);
        if (size == limit) break;
      }
    }
    if (count == 0) count = candidates.size();  // top_p of 1 but for rounding
    while (count > 1 && WeightOf(candidates[count - 1]) < row_.min_p) --count;
    return DrawFromPrefix(candidates, count);
  }

  int32_t DrawFromPrefix(const std::vector<Candidate>& candidates, size_t count) const {
    double total = 0.0;
    for (size_t i = 0; i < count; ++i) total += WeightOf(candidates[i]);
    const double target = Draw() * total;
    double sum = 0.0;
    size_t last = 0;
    for (size_t i = 0; i < count; ++i) {
      const double weight = WeightOf(candidates[i]);
      if (weight <= 0.0) break;
      sum += weight;
      last = i;
      if (sum > target) break;
    }
    return candidates[last].id;
  }

  // No top_k, no top_p. The logits become weights.
  int32_t DrawFromAll() const {
    HWY_DYNAMIC_DISPATCH(Weights)
    (logits_, vocab_size_, max_, inverse_temperature_, logits_);
    for (int64_t id = 0; row_.min_p > 0.0f && id < vocab_size_; ++id) {
      if (logits_[id] < row_.min_p) logits_[id] = 0.0f;
    }
    std::vector<double> sums;
    double total = 0.0;
    for (int64_t begin = 0; begin < vocab_size_; begin += kSumIds) {
      double sum = 0.0;
      const int64_t end = std::min(begin + kSumIds, vocab_size_);
      for (int64_t id = begin; id < end; ++id) sum += logits_[id];
      sums.push_back(sum);
      total += sum;
    }
    const double target = Draw() * total;
    double before = 0.0;
    size_t part = 0;
    while (part + 1 < sums.size() && before + sums[part] <= target) before += sums[part++];
    return DrawInPart(static_cast<int64_t>(part) * kSumIds, target - before);
  }

  // The first id from `begin` on whose running sum passes `target`; the last with any weight when
  // rounding leaves none.
  int32_t DrawInPart(int64_t begin, double target) const {
    double sum = 0.0;
    int64_t last = -1;
    for (int64_t id = begin; id < vocab_size_; ++id) {
      if (logits_[id] <= 0.0f) continue;
      sum += logits_[id];
      last = id;
      if (sum > target) break;
    }
    if (last < 0) last = std::max_element(logits_, logits_ + vocab_size_) - logits_;
    return static_cast<int32_t>(last);
  }

  const SampleRow& row_;
  float* const logits_;
  const int64_t vocab_size_;
  float max_ = 0.0f;
  float inverse_temperature_ = 1.0f;
};

}  // namespace

void SampleTokensCpu(const SampleTokensParams& params, ThreadPool& pool) {
  pool.ParallelFor(params.num_rows, [&](int64_t row, int32_t /*thread*/) {
    const int64_t vocab_size = params.vocab_size;
    const SampleRow& sample_row = params.rows[row];
    float* const logits = params.logits + row * vocab_size;
    const bool finite = HWY_DYNAMIC_DISPATCH(AllFinite)(logits, vocab_size);
    params.non_finite[row] = finite ? 0 : 1;
    params.token_ids[row] = 0;
    if (!finite) return;
    const bool logprobs = sample_row.top_logprobs >= 0;
    float* const drawn = logprobs ? params.scratch + row * vocab_size : logits;
    if (logprobs) std::copy(logits, logits + vocab_size, drawn);
    ApplyPenaltiesAndBiases(params, sample_row, drawn);
    const int32_t token = RowSampler(sample_row, drawn, vocab_size).Sample(params.banned_ids);
    params.token_ids[row] = token;
    if (!logprobs) return;
    WriteLogprobs(logits, vocab_size, token, sample_row.top_logprobs, drawn,
                  params.logprobs + row * kLogprobsPerRow);
  });
}

}  // namespace flashquant
#endif  // HWY_ONCE
