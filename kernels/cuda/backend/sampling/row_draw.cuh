// One row's draw: temperature, top-k, top-p, min-p and one seeded choice.
//
// Logits become weights, exp((logit - max) / temperature), in place. Nothing is sorted: every
// question is of one form, which key (a weight's bits, ordered as the weight) is the largest with
// at least `target` of some measure at or above it? With the measure 1 that is the k-th best, with
// the weight it is top-p's cut, and with a random target it is the draw itself. It is answered
// three bits of the key at a time. Sums of weights are 64-bit fixed point, so that they do not
// depend on their order; weights below half its unit count as 0. Ids of equal weight come lowest
// first.
#pragma once

#include <cstdint>

#include "kernels/cuda/backend/sampling/block.cuh"
#include "kernels/op_params.h"

namespace flashquant::cuda {

constexpr float kLeastWeight = 0x1p-41f;
constexpr uint32_t kLeastKey = 0x2B000000u;  // its bits
constexpr int kFirstShift = 27;              // 1 is at most kLeastKey + 8 << kFirstShift

// Which tokens may be drawn: all with a greater key, and the `ties` lowest ids with this one.
struct Cut {
  uint32_t key = kLeastKey - 1;
  uint64_t ties = 0;
};

// Measures of a weight.
struct CountMeasure {
  __device__ uint64_t operator()(float /*weight*/) const { return 1; }
};
struct WeightMeasure {
  float min_p = 0.0f;
  __device__ uint64_t operator()(float weight) const {
    return weight < min_p ? 0 : __float2ull_rn(weight * kFixedOne);
  }
};
// 1 for weights of one key.
struct KeyMeasure {
  uint32_t key = 0;
  __device__ uint64_t operator()(float weight) const {
    return __float_as_uint(weight) == key ? 1 : 0;
  }
};

// All threads of the block call Draw together.
class RowDraw {
 public:
  __device__ RowDraw(const SampleRow& row, float* logits, int vocab_size, SamplingShared& shared)
      : row_(row), logits_(logits), vocab_size_(vocab_size), shared_(shared) {}

  // The row's token; `best` is the lowest id with the greatest logit.
  __device__ int32_t Draw(int32_t best) {
    // Written so that NaN is greedy too.
    if (!(row_.temperature >= kGreedyTemperature)) return best;
    ToWeights(logits_[best]);
    const bool top_k = row_.top_k > 0 && row_.top_k < vocab_size_;
    const bool top_p = row_.top_p < 1.0f;
    if (top_k) CutToTopK();
    if (top_p) CutToTopP();
    const WeightMeasure measure{row_.min_p};
    const uint64_t total = Total(measure);
    if (total == 0) return best;  // min_p above 1
    const uint64_t target = DrawTarget(total);
    if (!top_k && !top_p) return FindInIdOrder(measure, target);
    const Cut drawn = Search(measure, target);
    return FindInIdOrder(KeyMeasure{drawn.key}, drawn.ties);
  }

 private:
  __device__ void ToWeights(float max) {
    const float inverse_temperature = 1.0f / row_.temperature;
    __syncthreads();  // all have read the maximum, which is overwritten too
#pragma unroll 4
    for (int id = threadIdx.x; id < vocab_size_; id += kThreads) {
      const float weight = expf((logits_[id] - max) * inverse_temperature);
      logits_[id] = weight < kLeastWeight ? 0.0f : weight;
    }
    __syncthreads();
  }

  __device__ void CutToTopK() {
    const auto wanted = static_cast<uint64_t>(row_.top_k);
    if (Total(CountMeasure{}) > wanted) cut_ = Search(CountMeasure{}, wanted);
  }

  // The fewest best tokens that hold top_p of what is left.
  __device__ void CutToTopP() {
    const WeightMeasure measure;
    const uint64_t total = Total(measure);
    const double wanted = ceil(static_cast<double>(row_.top_p) * static_cast<double>(total));
    uint64_t target = wanted > 1.0 ? static_cast<uint64_t>(wanted) : 1;
    target = target < total ? target : total;
    cut_ = Search(measure, target);
  }

  // Zeroes this thread's bins.
  __device__ void ClearBins() {
#pragma unroll
    for (int bin = 0; bin < kBins; ++bin) shared_.thread_bins[bin][threadIdx.x] = 0;
  }

  // Adds up each bin over the block, into shared_.bins for all threads: four warps a bin.
  __device__ void SumBins() {
    constexpr int kWarpsPerBin = kWarps / kBins;
    constexpr int kPerWarp = kThreads / kWarpsPerBin;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int bin = warp / kWarpsPerBin;
    __syncthreads();
    uint64_t sum = 0;
#pragma unroll
    for (int i = lane; i < kPerWarp; i += 32) {
      sum += shared_.thread_bins[bin][warp % kWarpsPerBin * kPerWarp + i];
    }
    sum = WarpSum(sum);
    if (lane == 0) shared_.warps[warp] = sum;
    __syncthreads();
    if (threadIdx.x < kBins) {
      sum = 0;
      for (int i = 0; i < kWarpsPerBin; ++i) sum += shared_.warps[threadIdx.x * kWarpsPerBin + i];
      shared_.bins[threadIdx.x] = sum;
    }
    __syncthreads();
  }

  // The measure of all tokens that may be drawn.
  template <typename Measure>
  __device__ uint64_t Total(const Measure& measure) {
    uint64_t sum = 0;
#pragma unroll 4
    for (int id = threadIdx.x; id < vocab_size_; id += kThreads) {
      const float weight = logits_[id];
      if (__float_as_uint(weight) > cut_.key) sum += measure(weight);
    }
    if (threadIdx.x == 0) sum += Ties(measure);
    return BlockSum(sum, shared_);
  }

  template <typename Measure>
  __device__ uint64_t Ties(const Measure& measure) const {
    return cut_.ties == 0 ? 0 : cut_.ties * measure(__uint_as_float(cut_.key));
  }

  // The key that the best tokens reach `target` of the measure with, and how many of its ids that
  // takes. 1 <= target <= Total(measure).
  template <typename Measure>
  __device__ Cut Search(const Measure& measure, uint64_t target) {
    uint32_t base = kLeastKey;
    uint64_t above = 0;  // of keys that are too great
    for (int shift = kFirstShift; shift >= 0; shift -= 3) {
      ClearBins();
#pragma unroll 4
      for (int id = threadIdx.x; id < vocab_size_; id += kThreads) {
        const float weight = logits_[id];
        const uint32_t key = __float_as_uint(weight);
        const uint32_t bin = (key - base) >> shift;
        if (key <= cut_.key || key < base || bin >= kBins) continue;
        shared_.thread_bins[bin][threadIdx.x] += measure(weight);
      }
      SumBins();
      uint32_t bin = kBins;
      do {
        --bin;
        const bool has_ties = cut_.key >= base && (cut_.key - base) >> shift == bin;
        const uint64_t sum = shared_.bins[bin] + (has_ties ? Ties(measure) : 0);
        if (bin == 0 || above + sum >= target) break;
        above += sum;
      } while (true);
      base += bin << shift;
    }
    const uint64_t each = measure(__uint_as_float(base));
    return {base, (target - above + each - 1) / each};
  }

  // The first id at which the running sum of the measure in id order reaches `target`.
  template <typename Measure>
  __device__ int32_t FindInIdOrder(const Measure& measure, uint64_t target) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int per_warp = (vocab_size_ + kThreads - 1) / kThreads * 32;
    uint64_t sum = 0;
    for (int i = lane; i < per_warp; i += 32) sum += MeasureAt(measure, warp * per_warp + i);
    sum = WarpSum(sum);
    __syncthreads();
    if (lane == 0) shared_.warps[warp] = sum;
    __syncthreads();
    uint64_t before = 0;
    int holder = 0;
    while (holder < kWarps - 1 && before + shared_.warps[holder] < target) {
      before += shared_.warps[holder++];
    }
    if (warp == holder) FindInSegment(measure, warp * per_warp, per_warp, target - before);
    __syncthreads();
    return shared_.id;
  }

  template <typename Measure>
  __device__ uint64_t MeasureAt(const Measure& measure, int id) const {
    return id < vocab_size_ ? measure(logits_[id]) : 0;
  }

  // One warp: the same over [begin, begin + length), length a multiple of 32.
  template <typename Measure>
  __device__ void FindInSegment(const Measure& measure, int begin, int length, uint64_t target) {
    const int lane = threadIdx.x % 32;
    for (int first = begin; first < begin + length; first += 32) {
      uint64_t sum = MeasureAt(measure, first + lane);
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const uint64_t left = __shfl_up_sync(kAllLanes, sum, offset);
        if (lane >= offset) sum += left;
      }
      const unsigned reached = __ballot_sync(kAllLanes, sum >= target);
      if (reached != 0) {
        if (lane == 0) shared_.id = first + __ffs(static_cast<int>(reached)) - 1;
        return;
      }
      target -= __shfl_sync(kAllLanes, sum, 31);
    }
  }

  // 1 to total, from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")
  // of (seed, output position), as on the CPU.
  __device__ uint64_t DrawTarget(uint64_t total) const {
    const auto position = static_cast<uint64_t>(row_.output_position);
    uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                           0, 0};
    uint32_t key[2] = {static_cast<uint32_t>(row_.seed), static_cast<uint32_t>(row_.seed >> 32)};
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
      const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
      const uint32_t next[4] = {
          static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
      for (int i = 0; i < 4; ++i) counter[i] = next[i];
      key[0] += 0x9E3779B9u;
      key[1] += 0xBB67AE85u;
    }
    const uint64_t bits = (static_cast<uint64_t>(counter[0]) << 32) | counter[1];
    const double uniform = static_cast<double>(bits >> 11) * 0x1p-53;
    const auto below = static_cast<uint64_t>(uniform * static_cast<double>(total));
    return below < total ? below + 1 : total;
  }

  const SampleRow& row_;
  float* const logits_;  // weights after ToWeights
  const int vocab_size_;
  SamplingShared& shared_;
  Cut cut_;
};

}  // namespace flashquant::cuda
